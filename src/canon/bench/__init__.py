"""`canon bench`: shapes, clocks, peers and tables."""
