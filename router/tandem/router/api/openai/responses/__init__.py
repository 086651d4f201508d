"""OpenAI's Responses API over the same chats, with a store of answers."""
