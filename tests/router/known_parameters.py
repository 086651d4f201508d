"""Names of parameters that others know: the openai package's own, and vLLM 0.33's extensions."""

from __future__ import annotations

from openai.types import completion_create_params as of_completions
from openai.types.chat import completion_create_params as of_chats

_BOTH = """
add_special_tokens allowed_token_ids bad_words cache_salt echo ec_transfer_params ignore_eos
include_stop_str_in_output kv_transfer_params length_penalty logprob_token_ids min_p min_tokens
priority prompt_logprobs repetition_detection repetition_penalty request_id response_format
return_mm_kwargs return_token_ids return_token_offsets return_tokens_as_token_ids
routed_experts_prompt_start session_id skip_special_tokens spaces_between_special_tokens
stop_token_ids stream_interval structured_outputs thinking_token_budget top_k
truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs watermarking guided_json
guided_regex guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern
structural_tag
"""
_CHAT = """
add_generation_prompt chat_template chat_template_kwargs continue_final_message documents
include_reasoning media_io_kwargs mm_processor_kwargs return_prompt_text thinking best_of
"""

OF_CHATS = frozenset(of_chats.CompletionCreateParamsBase.__annotations__) | {
    *_BOTH.split(),
    *_CHAT.split(),
}
OF_COMPLETIONS = frozenset(of_completions.CompletionCreateParamsBase.__annotations__) | {
    *_BOTH.split(),
    "prompt_embeds",
}
