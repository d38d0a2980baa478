"""Where the rooms meet: one REPL with its models, scheduler, record and runs."""
