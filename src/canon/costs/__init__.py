"""What a schedule costs before it runs: time, bytes and memory, by one model for all schedules."""
