"""`canon check`: the cases, the runs on several ranks, random draws and the report."""
