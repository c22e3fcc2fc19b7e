"""How fast's algorithms pack, send and receive what ranks exchange."""
