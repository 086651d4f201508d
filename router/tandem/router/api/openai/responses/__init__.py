"""OpenAI's Responses API over the same chats: items in and out, events, and a store of answers."""
