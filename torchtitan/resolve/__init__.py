"""From a configuration to a job: what must be known before any process group."""
