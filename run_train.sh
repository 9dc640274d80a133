#!/usr/bin/env bash
# Trains on this machine: checks the configuration, starts the run, returns its exit code.
#   NGPU         processes (default: the accelerators of this machine, else 1)
#   CONFIG_FILE  the TOML file, or the name of a preset (default: the debug model)
#   LOG_RANK     ranks whose output is shown, comma-separated (default: 0)
# Everything else is an override: ./run_train.sh --training.steps 20 --optimizer.lr 1e-3
exec python -m torchtitan.launch "$@"
