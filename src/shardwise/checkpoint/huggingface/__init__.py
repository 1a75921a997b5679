"""Folders of Hugging Face: read straight into shards, written by all ranks together. See `importing`, `exporting`."""

from shardwise.checkpoint.huggingface.exporting import (
    ExportPlan,
    ExportTensor,
    begin_export,
    discard_export,
    finish_export,
    plan_export,
    temporary_folder,
    write_export,
)
from shardwise.checkpoint.huggingface.families import decoder_config_of, decoder_names, family_names, hf_config_of
from shardwise.checkpoint.huggingface.importing import open_folder, read_config
from shardwise.checkpoint.huggingface.names import NameMap, Part, Rule

__all__ = [
    "ExportPlan",
    "ExportTensor",
    "NameMap",
    "Part",
    "Rule",
    "begin_export",
    "decoder_config_of",
    "decoder_names",
    "discard_export",
    "family_names",
    "finish_export",
    "hf_config_of",
    "open_folder",
    "plan_export",
    "read_config",
    "temporary_folder",
    "write_export",
]
