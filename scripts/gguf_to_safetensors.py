"""Turn a GGUF file into a folder that vLLM can serve: bfloat16 safetensors and the tokenizer.

    python scripts/gguf_to_safetensors.py model.gguf folder

The weights are those of the GGUF file, de-quantised. Needs torch, transformers, accelerate, gguf.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel


def convert(gguf: Path, folder: Path) -> None:
    """Write the folder; it appears only once it is complete.

    Raises:
        SystemExit: The file has no chat template, or weights that stayed quantised.
    """
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise SystemExit(f"{gguf.name} has no chat template; choose an instruction-tuned model")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    load_dequantised(gguf).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def load_dequantised(gguf: Path) -> PreTrainedModel:
    """Return the model with plain bfloat16 weights and no trace of its quantisation."""
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    strange = [name for name, value in model.named_parameters() if value.dtype != torch.bfloat16]
    if strange:
        raise SystemExit(f"{gguf.name}: still quantised after loading: {', '.join(strange[:3])}, …")
    # transformers refuses to save what it takes for quantised, and the markers stay after loading.
    model.hf_quantizer = None
    model.is_quantized = False
    vars(model.config).pop("quantization_config", None)
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    convert(arguments.gguf, arguments.folder)
