"""Other people's formats, a file each."""

from loopscale.convert.formats.base import Format
from loopscale.convert.formats.deepspeed import DeepSpeed
from loopscale.convert.formats.gguf import Gguf
from loopscale.convert.formats.hf import Hf
from loopscale.convert.formats.huginn import Huginn
from loopscale.convert.formats.llama import Llama
from loopscale.convert.formats.megatron import Megatron
from loopscale.convert.formats.ouro import Ouro
from loopscale.convert.formats.parcae import Parcae
from loopscale.convert.formats.xllm import Xllm

FORMATS: dict[str, Format] = {
    f.name: f for f in (Hf(), Huginn(), Ouro(), Parcae(), Xllm(), Llama(), Gguf(), Megatron(), DeepSpeed())
}
"""By the names that `--to` and `--from` take."""
