#!/bin/sh
# Prints the architecture that the GPU engine is to be built for on this host, as meson's gpu_arch has
# it (90a, 86); nothing where there is no compiler, no driver or no GPU.
set -eu
command -v nvcc >/dev/null 2>&1 && command -v nvidia-smi >/dev/null 2>&1 || exit 0
# Without a driver nvidia-smi says so on standard output.
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d '. ')
case $capability in
'' | *[!0-9]*) exit 0 ;;
90) echo 90a ;;
*) echo "$capability" ;;
esac
