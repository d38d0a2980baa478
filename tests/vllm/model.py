"""The model that vLLM serves in tests and benchmarks: SmolLM2, in the format that vLLM reads.

It is made of the file of the embedded model, which every machine that runs the tests has, so that
nothing else is downloaded. It is kept in the user's cache beside it.

Run as a script, by the interpreter that has vLLM: ``python model.py FILE.gguf FOLDER``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["converted_model"]

FOLDER_NAME = "SmolLM2-135M-Instruct-bf16"
CONVERT_S = 600.0


def converted_model(python: Path) -> Path:
    """The folder of the model; *python* converts it where it is not there, in half a minute.

    Raises
    ------
    RuntimeError
        It cannot be converted; the message ends with what the converter said.
    """
    from rlm_kernel.subcalls.embedded.model_file import ensure_model

    source = ensure_model()
    target = source.parent / FOLDER_NAME
    if target.is_dir():
        return target
    with tempfile.TemporaryDirectory(dir=source.parent, prefix=".convert-") as folder:
        made = Path(folder) / FOLDER_NAME
        done = subprocess.run(
            [str(python), "-P", __file__, str(source), str(made)],
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CONVERT_S,
        )
        if done.returncode:
            raise RuntimeError(f"{source.name} was not converted: {done.stderr[-2000:]}")
        made.rename(target)  # in one step and last: a folder that is there is whole
    return target


def _convert(source: Path, target: Path) -> None:
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
