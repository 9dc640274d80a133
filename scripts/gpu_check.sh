#!/usr/bin/env bash
# What one GPU gives, in one command and under ten minutes: scripts/gpu_check.sh [FOLDER]
# Throughput, MFU and memory of 1B and 3B models, as many settings as there is time for, what is out of memory being
# named; whether the device computes the same in every setting; what a save costs. Without a GPU, a small form of each.
# FOLDER (default runs/gpu_check) holds gpu_check.md and the JSON of both parts. Ends with 1 if anything is wrong.
set -euo pipefail
case ${1:-} in -*) sed -n '2,5s/^# //p' "$0"; [[ $1 == -h || $1 == --help ]]; exit ;; esac
cd "$(dirname "$0")/.."
out=${1:-runs/gpu_check}
mkdir -p "$out"
if python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  grid=(gpu --rounds 1 --steps 28 --log-freq 5 --minutes 6.5) size=()
else
  echo "no GPU here: a small form on the CPU"
  grid=(gpu-small --rounds 1 --steps 5) size=(--small)
fi
# First what is short, and says whether the figures mean anything.
python scripts/device_check.py "${size[@]}" --save "$out" && wrong=0 || wrong=$?
python scripts/benchmark.py "${grid[@]}" --save "$out" || wrong=$?
cat "$out/benchmark.md" <(echo) "$out/device_check.md" >"$out/gpu_check.md"
echo "written: $out/gpu_check.md, benchmark.json, device_check.json"
exit "$wrong"
