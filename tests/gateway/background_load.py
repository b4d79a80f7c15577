"""Requests in the background that must all succeed."""

from __future__ import annotations

import asyncio

import aiohttp

from tests.gateway.stack import GatewayStack, wait_until


class BackgroundLoad:
    """Requests one after the other on a few lanes, until it is stopped; every answer is kept."""

    def __init__(self, stack: GatewayStack) -> None:
        self._stack = stack
        self.answers: list[int | str] = []
        self._going = True
        self._lanes = [asyncio.ensure_future(self._lane(bool(lane % 2))) for lane in range(4)]

    async def _lane(self, stream: bool) -> None:
        while self._going:
            try:
                async with self._stack.ask(stream=stream) as answer:
                    text = await answer.text()
                    whole = answer.status == 200 and (not stream or text.endswith("data: [DONE]\n\n"))
                    self.answers.append(200 if whole else f"{answer.status} {text[-200:]}")
            except aiohttp.ClientError as error:
                self.answers.append(repr(error))
            await asyncio.sleep(0.005)

    async def more(self, count: int = 40) -> None:
        """Wait for so many more answers."""
        target = len(self.answers) + count
        await wait_until(lambda: len(self.answers) >= target, f"{count} more answers")

    async def end(self) -> None:
        self._going = False
        await asyncio.gather(*self._lanes)
        assert set(self.answers) == {200}
