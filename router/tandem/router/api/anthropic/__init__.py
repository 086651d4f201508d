"""Anthropic's Messages API over the same chats: blocks in and out, its events and its errors."""
