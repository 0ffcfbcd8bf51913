#!/bin/sh
# deploy/gpu_arch.sh with programs that stand for nvcc and nvidia-smi.
#
# usage: gpu_arch.sh ROOT
set -eu
root=$1
bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
for tool in sh head tr; do # and nothing else, least of all the host's nvcc
    ln -s "$(command -v $tool)" "$bin/$tool"
done

# expect WANTED EXIT_STATUS OUTPUT: what is printed where nvidia-smi says OUTPUT.
expect() {
    printf '#!/bin/sh\nprintf "%%s\\n" "%s"\nexit %s\n' "$3" "$2" >"$bin/nvidia-smi"
    chmod +x "$bin/nvidia-smi"
    got=$(PATH=$bin sh "$root/deploy/gpu_arch.sh") || got="exit $?"
    [ "$got" = "$1" ] || { echo "'$3' gives '$got', not '$1'"; exit 1; }
}

expect '' 0 9.0 # no compiler
printf '#!/bin/sh\n' >"$bin/nvcc"
chmod +x "$bin/nvcc"
expect 90a 0 9.0
expect 86 0 8.6
expect 120 0 12.0
expect 90a 0 '9.0
9.0'
expect '' 9 "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
expect '' 6 'No devices were found'
expect '' 0 '[N/A]'
expect '' 0 ''
rm "$bin/nvidia-smi"
got=$(PATH=$bin sh "$root/deploy/gpu_arch.sh")
[ -z "$got" ] || { echo "without nvidia-smi: '$got'"; exit 1; }
echo "gpu_arch: right for 9 answers of nvidia-smi, and without it"
