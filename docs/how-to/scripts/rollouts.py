"""Rollouts from one state: the sandbox is forked, memory and all, each copy tries an action of its own and is scored; the best one is where
the next step begins, and if none is better, the step is rolled back to a snapshot of the state before.

    pip install e2b
    python3 rollouts.py
"""

import asyncio
import os
import random

from e2b import AsyncSandbox

# The environment: a game that a process holds in its memory. An action moves it; a score says how near it is to 42.
GAME = """
import socketserver
position = 0
class Move(socketserver.StreamRequestHandler):
    def handle(self):
        global position
        position += int(self.rfile.readline())
        self.wfile.write(f"{-abs(42 - position)}\\n".encode())
socketserver.TCPServer(("127.0.0.1", 7000), Move).serve_forever()
"""
MOVE = "exec 3<>/dev/tcp/127.0.0.1/7000; echo {} >&3; cat <&3"
TIMEOUT = 600


async def act(sandbox, action):
    """Takes an action; the score."""
    result = await sandbox.commands.run(MOVE.format(action))
    return int(result.stdout)


async def start():
    """The state that everything begins with: the game runs, and has taken no action."""
    sandbox = await AsyncSandbox.create(os.environ.get("TEMPLATE", "base"), timeout=TIMEOUT)
    await sandbox.files.write("game.py", GAME)
    await sandbox.commands.run("python3 game.py", background=True)
    while not (await sandbox.commands.run("exec 3<>/dev/tcp/127.0.0.1/7000 && echo up || true")).stdout:
        await asyncio.sleep(0.1)
    return sandbox


async def step(sandbox, policy, width):
    """Tries so many actions at once, each in a fork; the fork that did best, with its score. The others are gone."""
    made = await sandbox.fork(count=width, timeout=TIMEOUT)
    copies = [one for one in made if isinstance(one, AsyncSandbox)]
    scores = await asyncio.gather(*(act(copy, policy()) for copy in copies))
    best = max(range(len(copies)), key=scores.__getitem__)
    await asyncio.gather(*(copy.kill() for number, copy in enumerate(copies) if number != best))
    return copies[best], scores[best]


async def rollout(policy, steps=4, width=3):
    """A whole one; the best score of each step."""
    sandbox, score, scores = await start(), -42, []
    snapshot = await sandbox.create_snapshot()
    for _ in range(steps):
        copy, reached = await step(sandbox, policy, width)
        await sandbox.kill()
        if reached > score:
            await AsyncSandbox.delete_snapshot(snapshot.snapshot_id)
            sandbox, score, snapshot = copy, reached, await copy.create_snapshot()
        else:
            # Nothing was won: back to the state before, and another try.
            await copy.kill()
            sandbox = await AsyncSandbox.create(snapshot.snapshot_id, timeout=TIMEOUT)
        scores.append(score)
        print(f"score {score}", flush=True)
    await sandbox.kill()
    await AsyncSandbox.delete_snapshot(snapshot.snapshot_id)
    return scores


if __name__ == "__main__":
    asyncio.run(rollout(lambda: random.randint(-5, 20)))
