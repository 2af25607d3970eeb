#!/bin/bash
# Install nvcc and the headers of the CUDA runtime into a manylinux_2_28 container, from NVIDIA's repository.
#   ci/install_nvcc.sh VERSION      such as 13-0; it lands in /usr/local/cuda-13.0
set -euo pipefail
version=${1:?expected the version of CUDA, such as 13-0}
case $(uname -m) in
  x86_64) folder=x86_64 ;;
  aarch64) folder=sbsa ;;
  *) echo "install_nvcc.sh: no CUDA for $(uname -m); expected x86_64 or aarch64" >&2; exit 1 ;;
esac
dnf config-manager --add-repo "https://developer.download.nvidia.com/compute/cuda/repos/rhel8/$folder/cuda-rhel8.repo"
dnf install -y "cuda-nvcc-$version" "cuda-cudart-devel-$version"
"/usr/local/cuda-${version/-/.}/bin/nvcc" --version
