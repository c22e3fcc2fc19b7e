"""Canon as the attention of other frameworks: one module for each, imported by its name."""
