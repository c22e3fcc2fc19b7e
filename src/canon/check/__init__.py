"""`canon check`: the cases, the runs, random draws and the report."""
