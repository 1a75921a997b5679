"""Folders of Hugging Face: read straight into shards, written by all ranks together. See `importing`, `exporting`."""

from shardwise.checkpoint.huggingface.describing import (
    GENERATION_NAME,
    config_files,
    decoder_config,
    describe,
    describe_decoder,
    names_of,
    wanted_of,
)
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
from shardwise.checkpoint.huggingface.jointly import ExportRequest, export_jointly, exported_dtype, in_order
from shardwise.checkpoint.huggingface.names import NameMap, Part, Rule

__all__ = [
    "GENERATION_NAME",
    "ExportPlan",
    "ExportRequest",
    "ExportTensor",
    "NameMap",
    "Part",
    "Rule",
    "begin_export",
    "config_files",
    "decoder_config",
    "decoder_config_of",
    "decoder_names",
    "describe",
    "describe_decoder",
    "discard_export",
    "export_jointly",
    "exported_dtype",
    "family_names",
    "finish_export",
    "hf_config_of",
    "in_order",
    "names_of",
    "open_folder",
    "plan_export",
    "read_config",
    "temporary_folder",
    "wanted_of",
    "write_export",
]
