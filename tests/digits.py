"""A task that a random model learns in seconds: answer with digits."""

from tasks.task import Problem


class Digits:
    """Reward: share of a response's characters that are digits."""

    name = "digits"

    def __init__(self, max_prompt_tokens: int = 6, max_response_tokens: int = 3) -> None:
        self.chat = False
        self.max_prompt_tokens, self.max_response_tokens = max_prompt_tokens, max_response_tokens

    def problems(self, split: str) -> list[Problem]:
        first, count = (100, 64) if split == "train" else (500, 24)
        return [Problem(prompt_id=i, prompt=f"{first + i}:", answer="") for i in range(count)]

    def score(self, problems: list[Problem], responses: list[str]) -> list[dict[str, float]]:
        return [{"digits": sum(c.isdigit() for c in r) / 3} for r in responses]
