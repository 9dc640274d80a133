#!/usr/bin/env bash
# Trains on this machine: checks the configuration, starts torchrun, returns the run's own exit code.
#   NGPU         processes (default: the accelerators of this machine, else 1)
#   CONFIG_FILE  the TOML file (default: the debug model)
#   LOG_RANK     ranks whose output is shown, comma-separated (default: 0)
# Everything else is an override: ./run_train.sh --training.steps 20 --optimizer.lr 1e-3
set -euo pipefail
config=${CONFIG_FILE:-"$(dirname "$(readlink -f "$0")")/train_configs/debug_model.toml"}
exec python -m torchtitan.launch --job.config_file "$config" "$@"
