"""Guess a number from 1 to 20 with OpenAI's client, as any program would that knows nothing of training.

Started for one episode, it plays the task on standard input and posts its reward.  Started for a whole run, it takes
one episode after another from the endpoint and plays many of them at a time.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import httpx2
from openai import AsyncOpenAI, BadRequestError

sys.path.append(str(Path(__file__).parents[1] / "tiny_agentic"))
from games import GuessNumber

AT_A_TIME = 32


async def play(client: AsyncOpenAI, seed: int) -> bool:
    """Play one game; True if the number was found."""
    game = GuessNumber(max_number=20, max_steps=5)
    text, _ = game.reset(seed)
    messages = [{"role": "user", "content": text}]
    while True:
        response = await client.chat.completions.create(model="gpt-4o-mini", messages=messages)
        guess = response.choices[0].message.content
        text, reward, terminated, truncated, _ = game.step(guess)
        if terminated or truncated:
            return reward > 0
        messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": text}]


async def one_episode() -> None:
    """The episode that this program was started for: address and key are in the environment, where the client looks."""
    task = json.load(sys.stdin)
    async with AsyncOpenAI() as client, httpx2.AsyncClient() as http:
        found = await play(client, task["seed"])
        await post_reward(http, os.environ["ROLL_REWARD_URL"], os.environ["OPENAI_API_KEY"], found)


async def many_episodes() -> None:
    """Take episodes until the run ends."""
    own = {"Authorization": f"Bearer {os.environ['ROLL_WORKER_KEY']}"}
    async with httpx2.AsyncClient(timeout=600) as http, AsyncOpenAI(api_key="given by each episode") as shared:

        async def serve() -> None:
            while True:
                answer = await http.post(os.environ["ROLL_EPISODES_URL"], params={"wait": 30}, headers=own)
                if answer.status_code == 204:
                    continue
                episode = answer.raise_for_status().json()
                client = shared.with_options(base_url=f"{episode['base_url']}/v1", api_key=episode["key"])
                try:
                    found = await play(client, episode["task"]["seed"])
                except BadRequestError:  # the conversation has become too long
                    found = False
                await post_reward(http, f"{episode['base_url']}/reward", episode["key"], found)

        await asyncio.gather(*(serve() for _ in range(AT_A_TIME)))


async def post_reward(http: httpx2.AsyncClient, url: str, key: str, found: bool) -> None:
    """End the episode with its reward."""
    body = {"reward": float(found), "success": found}
    (await http.post(url, headers={"Authorization": f"Bearer {key}"}, json=body)).raise_for_status()


if __name__ == "__main__":
    asyncio.run(many_episodes() if "ROLL_WORKER_KEY" in os.environ else one_episode())
