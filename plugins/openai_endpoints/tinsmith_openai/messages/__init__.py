"""Anthropic's Messages API, over the same chats as OpenAI's."""
