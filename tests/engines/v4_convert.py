"""Run llama.cpp's converter on a DeepSeek-V4 directory with float32 experts: v4_convert.py CONVERTER_DIR ARGUMENTS...

The stock converter takes routed experts as MXFP4 only, whose rounding hides small mistakes. Here they are written as
they are.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def main() -> None:
    root = Path(sys.argv[1])
    sys.path[:0] = [str(root / "gguf-py"), str(root)]
    import convert_hf_to_gguf
    import torch
    from conversion import deepseek
    from conversion.base import LazyTorchTensor

    def float_experts(self: Any, bid: int, proj: str, key: Any) -> list[str]:
        names = [f"layers.{bid}.ffn.experts.{e}.{proj}.weight" for e in range(self.hparams["n_routed_experts"])]
        experts = [LazyTorchTensor.to_eager(self.model_tensors[name]()).float() for name in names]
        self.gguf_writer.add_tensor(self.format_tensor_name(key, bid), torch.stack(experts).numpy())
        return names

    deepseek.DeepseekV4Model._write_mxfp4_expert_tensor = float_experts
    sys.argv = ["convert_hf_to_gguf.py", *sys.argv[2:]]
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main()
