"""Options of vLLM and SGLang, and their treatment here, for command lines and ``LLM``.

Options with the same name here are not listed.
"""

from __future__ import annotations

from collections.abc import Mapping

SAME: Mapping[str, str] = {
    # vLLM
    "tp": "tensor_parallel_size",
    "scheduling_policy": "policy",
    # SGLang
    "model_path": "model",
    "tokenizer_path": "tokenizer",
    "context_length": "max_model_len",
    "mem_fraction_static": "gpu_memory_utilization",
    "max_running_requests": "max_num_seqs",
    "chunked_prefill_size": "max_num_batched_tokens",
    "max_prefill_tokens": "max_num_batched_tokens",
    "random_seed": "seed",
    "tp_size": "tensor_parallel_size",
    "tensor_parallel": "tensor_parallel_size",
    "page_size": "block_size",
    "json_model_override_args": "hf_overrides",
    "disable_radix_cache": "no_enable_prefix_caching",
    "disable_cuda_graph": "enforce_eager",
    "schedule_policy": "policy",
    "grammar_backend": "structured_outputs_backend",
    "guided_decoding_backend": "structured_outputs_backend",
    "admin_key": "admin_api_key",
}
"""Options with another name in Tandem."""

NEEDLESS: Mapping[str, str] = {
    "trust_remote_code": "no model's own code is ever run",
    "enable_auto_tool_choice": "calls of tools are always looked for",
    "exclude_tools_when_tool_choice_none": "the template is shown no tools then",
    "enable_reasoning": "reasoning is always looked for",
    "disable_log_requests": "requests are not logged",
    "disable_uvicorn_access_log": "there is no access log",
    "disable_access_log_for_endpoints": "there is no access log",
    "uvicorn_log_level": "--log-level is for all",
    "log_level_http": "--log-level is for all",
    "max_log_len": "prompts are not logged",
    "disable_log_stats": "--log-stats-interval says how often counts are logged",
    "max_seq_len_to_capture": "the sizes of graphs follow --max-num-seqs",
    "max_num_partial_prefills": "--long-prefill-token-threshold bounds a prompt's tokens in a step",
    "enable_sleep_mode": "POST /sleep is always there for administrators",
    "swap_space": "preempted requests are computed again, not swapped",
    "cpu_offload_gb": "weights stay on the device",
    "task": "the model's folder decides what it returns",
    "runner": "the model's folder decides what it returns",
    "convert": "the model's folder decides what it returns",
    "is_embedding": "the model's folder decides what it returns",
    "enable_chunked_prefill": "prompts are always cut into chunks",
    "disable_chunked_prefill_size": "prompts are always cut into chunks",
    "tokenizer_mode": "there is one kind of tokenizer, tokenizer.json",
    "tokenizer_revision": "--tokenizer names a folder or a hub id",
    "skip_tokenizer_init": "a prompt of token ids is taken in any case",
    "download_dir": "HF_HOME says where files of the hub are kept",
    "config_format": "config.json is read",
    "use_v2_block_manager": "there is one block manager",
    "num_scheduler_steps": "steps are launched ahead by themselves",
    "multi_step_stream_outputs": "steps are launched ahead by themselves",
    "disable_async_output_proc": "outputs are always processed next to steps",
    "disable_overlap_schedule": "--no-async-scheduling turns it off",
    "enable_metrics": "metrics are always served",
    "enable_cache_report": "cached tokens are always in the usage",
    "enable_prompt_tokens_details": "cached tokens are always in the usage",
    "enable_server_load_tracking": "GET /load always answers",
    "return_tokens_as_token_ids": "a request asks for it",
    "enable_request_id_headers": "answers always carry their id",
    "disable_frontend_multiprocessing": "the router is always a process of its own",
    "chat_template_content_format": "the template is probed for it",
    "response_role": "the role is assistant",
    "device_ids": "CUDA_VISIBLE_DEVICES says which",
    "base_gpu_id": "CUDA_VISIBLE_DEVICES says which",
    "disable_custom_all_reduce": "one GPU computes a model",
    "enforce_disable_flashinfer_cutlass_moe": "there are no experts",
    "enable_mixed_chunk": "prompts are always computed next to decodes",
    "enable_torch_compile": "steps are captured as graphs",
    "compilation_config": "steps are captured as graphs",
    "O": "steps are captured as graphs",
    "cuda_graph_sizes": "the sizes follow --max-num-seqs",
    "cuda_graph_max_bs": "the sizes follow --max-num-seqs",
    "watchdog_timeout": "each wait has its own deadline",
    "disable_fastapi_docs": "the pages show no data",
    "weight_loader_disable_mmap": "weights are read once",
    "preemption_mode": "preempted requests are computed again",
    "max_parallel_loading_workers": "one process reads the weights",
    "ray_workers_use_nsight": "there is no Ray",
    "disable_mm_preprocessor_cache": "no images are taken",
    "limit_mm_per_prompt": "no images are taken",
    "mm_processor_kwargs": "no images are taken",
    "mm_processor_cache_gb": "no images are taken",
    "interleave_mm_strings": "no images are taken",
    "language_model_only": "no images are taken",
}
"""Options without effect, and why."""
SWITCHES = frozenset({
    "trust_remote_code", "enable_auto_tool_choice", "exclude_tools_when_tool_choice_none",
    "enable_reasoning", "disable_log_requests", "disable_uvicorn_access_log", "is_embedding",
    "enable_chunked_prefill", "skip_tokenizer_init", "use_v2_block_manager",
    "multi_step_stream_outputs", "disable_async_output_proc", "disable_overlap_schedule",
    "enable_metrics", "enable_cache_report", "enable_prompt_tokens_details",
    "enable_server_load_tracking", "return_tokens_as_token_ids", "enable_request_id_headers",
    "disable_frontend_multiprocessing", "disable_custom_all_reduce", "enable_mixed_chunk",
    "enable_torch_compile", "disable_fastapi_docs", "weight_loader_disable_mmap",
    "ray_workers_use_nsight", "disable_mm_preprocessor_cache", "interleave_mm_strings",
    "language_model_only", "enable_sleep_mode", "disable_radix_cache", "disable_cuda_graph",
    "disable_log_stats",
})  # fmt: skip
"""Options above that take no value."""

REFUSED: Mapping[str, str] = {
    "pipeline_parallel_size": "one GPU computes a model in this version",
    "pp": "one GPU computes a model in this version",
    "pp_size": "one GPU computes a model in this version",
    "data_parallel_size": "start several workers: tandem up --decode N",
    "dp": "start several workers: tandem up --decode N",
    "dp_size": "start several workers: tandem up --decode N",
    "enable_expert_parallel": "mixtures of experts are not computed in this version",
    "ep_size": "mixtures of experts are not computed in this version",
    "quantization": "config.json says how weights are quantised; they are not quantised at load",
    "q": "config.json says how weights are quantised; they are not quantised at load",
    "enable_lora": "adapters are not served in this version",
    "lora_modules": "adapters are not served in this version",
    "lora_paths": "adapters are not served in this version",
    "max_loras": "adapters are not served in this version",
    "max_lora_rank": "adapters are not served in this version",
    "speculative_config": "drafts are not proposed in this version",
    "speculative_model": "drafts are not proposed in this version",
    "num_speculative_tokens": "drafts are not proposed in this version",
    "speculative_algorithm": "drafts are not proposed in this version",
    "rope_scaling": "give it in config.json, by --hf-overrides",
    "rope_theta": "give it in config.json, by --hf-overrides",
    "ssl_keyfile": "TLS is for a proxy in front of the router",
    "ssl_certfile": "TLS is for a proxy in front of the router",
    "ssl_ca_certs": "TLS is for a proxy in front of the router",
    "kv_transfer_config": "tandem up hands KV over by itself; see tandem prefill --help",
    "disaggregation_mode": "tandem prefill and tandem decode are the two roles",
    "tool_parser_plugin": "there are 21 formats: --tool-call-parser",
    "code_revision": "no model's own code is ever run",
    "allowed_local_media_path": "images and audio are not taken in this version",
    "logits_processor_pattern": "--logits-processors names the classes",
}
"""Unsupported options, with an alternative or the reason."""


def fate_of(name: str, value: object = True) -> str | None:
    """Return why an option has no effect; None if it is not in the tables.

    ``name`` has underscores. An option that is off has no effect.
    """
    if name in NEEDLESS:
        return NEEDLESS[name]
    return "it is off" if name in REFUSED and value in (None, False, "") else None
