#!/bin/sh
# Every header compiles alone, as C17 and (what CUDA sources see) as C++17.
#
# usage: check_headers.sh "CC..." "CXX..." ROOT; CXX may be empty.
set -eu
cc=$1 cxx=$2 root=$3
cd "$root"
count=0
cuda=/usr/local/cuda/include
[ -f $cuda/cuda_runtime_api.h ] || cuda=$(dirname "$(command -v nvcc || echo /)")/../include
for header in $(find proto kernels client server tests -name '*.h' | sort); do
    # Those that need CUDA's, by what they include or by where they are.
    case $header$(grep -l cuda_runtime "$header" || true) in
    kernels/cuda/* | *.h*.h) [ -f "$cuda/cuda_runtime_api.h" ] || continue ;;
    esac
    isa=
    case $header in # vectors of one instruction set compile only with its flags
    kernels/cpu/simd_avx*) isa='-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl'
        $cc $isa -fsyntax-only -x c /dev/null 2>/dev/null || continue ;;
    kernels/cpu/simd_neon*)
        echo '#include <arm_neon.h>' | $cc -fsyntax-only -x c - 2>/dev/null || continue ;;
    esac
    # tests/ headers use cmocka's set of prerequisites, which its users include first.
    $cc $isa -std=c17 -D_GNU_SOURCE -Wall -Wextra -Werror -I. -isystem "$cuda" -fsyntax-only -x c "$header" ||
        { echo "$header does not compile alone as C"; exit 1; }
    count=$((count + 1))
done
if [ -n "$cxx" ]; then
    for header in proto/types.h proto/block.h proto/params.h proto/request.h kernels/engine.h client/dropkv.h client/dropkv/*.h; do
        [ -f "$header" ] || continue
        $cxx -std=c++17 -Wall -Wextra -Werror -I. -fsyntax-only -x c++ "$header" ||
            { echo "$header does not compile alone as C++"; exit 1; }
    done
fi
echo "headers: $count compile alone"
