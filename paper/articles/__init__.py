"""Articles of one finding each: their tables, numbers and figures."""
