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
    "trust_remote_code": "a model's own code is not run",
    "enable_auto_tool_choice": "tool calls are always parsed",
    "exclude_tools_when_tool_choice_none": "the template never gets tools in that case",
    "enable_reasoning": "reasoning is always parsed",
    "disable_log_requests": "requests are not logged",
    "disable_uvicorn_access_log": "there is no access log",
    "disable_access_log_for_endpoints": "there is no access log",
    "uvicorn_log_level": "--log-level applies to all logs",
    "log_level_http": "--log-level applies to all logs",
    "max_log_len": "prompts are not logged",
    "disable_log_stats": "--log-stats-interval sets the interval; 0 disables them",
    "max_seq_len_to_capture": "the sizes of graphs follow --max-num-seqs",
    "max_num_partial_prefills": "--long-prefill-token-threshold bounds a prompt's tokens in a step",
    "enable_sleep_mode": "POST /sleep is always available to administrators",
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
    "skip_tokenizer_init": "prompts of token ids are always accepted",
    "download_dir": "HF_HOME is the folder of files from the hub",
    "config_format": "config.json is read",
    "use_v2_block_manager": "there is one block manager",
    "num_scheduler_steps": "--async-scheduling launches steps ahead",
    "multi_step_stream_outputs": "--async-scheduling launches steps ahead",
    "disable_async_output_proc": "outputs are always processed next to steps",
    "disable_overlap_schedule": "use --no-async-scheduling",
    "enable_metrics": "metrics are always served",
    "enable_cache_report": "cached tokens are always in the usage",
    "enable_prompt_tokens_details": "cached tokens are always in the usage",
    "enable_server_load_tracking": "GET /load is always served",
    "return_tokens_as_token_ids": "requests set return_token_ids",
    "enable_request_id_headers": "answers always have X-Request-Id",
    "disable_frontend_multiprocessing": "the router is always a process of its own",
    "chat_template_content_format": "the router tests the template",
    "response_role": "the role is assistant",
    "device_ids": "set CUDA_VISIBLE_DEVICES",
    "base_gpu_id": "set CUDA_VISIBLE_DEVICES",
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
    "disable_mm_preprocessor_cache": "images are not supported",
    "limit_mm_per_prompt": "images are not supported",
    "mm_processor_kwargs": "images are not supported",
    "mm_processor_cache_gb": "images are not supported",
    "interleave_mm_strings": "images are not supported",
    "language_model_only": "images are not supported",
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
    "pipeline_parallel_size": "layers are not divided between GPUs in this version",
    "pp": "layers are not divided between GPUs in this version",
    "pp_size": "layers are not divided between GPUs in this version",
    "data_parallel_size": "start several workers: tandem up --decode N",
    "dp": "start several workers: tandem up --decode N",
    "dp_size": "start several workers: tandem up --decode N",
    "enable_expert_parallel": "mixtures of experts are not computed in this version",
    "ep_size": "mixtures of experts are not computed in this version",
    "q": "config.json sets the quantisation; weights are not quantised at load",
    "enable_lora": "adapters are not served in this version",
    "lora_modules": "adapters are not served in this version",
    "lora_paths": "adapters are not served in this version",
    "max_loras": "adapters are not served in this version",
    "max_lora_rank": "adapters are not served in this version",
    "speculative_model": "use speculative_config; models that draft are not served yet",
    "num_speculative_tokens": "use speculative_config",
    "speculative_algorithm": "use speculative_config with method ngram",
    "rope_scaling": "give it in config.json, by --hf-overrides",
    "rope_theta": "give it in config.json, by --hf-overrides",
    "ssl_keyfile": "TLS is for a proxy in front of the router",
    "ssl_certfile": "TLS is for a proxy in front of the router",
    "ssl_ca_certs": "TLS is for a proxy in front of the router",
    "kv_transfer_config": "tandem up hands KV over by itself; see tandem prefill --help",
    "disaggregation_mode": "tandem prefill and tandem decode are the two roles",
    "tool_parser_plugin": "there are 21 formats: --tool-call-parser",
    "code_revision": "a model's own code is not run",
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
