"""Reads Hugging Face folders straight into shards (`importer`), and writes them from all ranks (`exporter`)."""

from shardwise.checkpoint.hf.config_files import (
    GENERATION_NAME,
    config_files,
    decoder_config,
    describe,
    describe_decoder,
    names_of,
    wanted_of,
)
from shardwise.checkpoint.hf.exporter import (
    ExportPlan,
    ExportRequest,
    ExportTensor,
    begin_export,
    discard_export,
    export_jointly,
    exported_dtype,
    finish_export,
    in_order,
    plan_export,
    temporary_folder,
    write_export,
)
from shardwise.checkpoint.hf.families import decoder_config_of, decoder_names, family_names, hf_config_of
from shardwise.checkpoint.hf.importer import open_folder, read_config
from shardwise.checkpoint.hf.key_map import NameMap, Rule, WeightPart

__all__ = [
    "GENERATION_NAME",
    "ExportPlan",
    "ExportRequest",
    "ExportTensor",
    "NameMap",
    "Rule",
    "WeightPart",
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
