"""Two parts of one policy through OpenAI's client and Anthropic's: one asks, the other answers."""

import json
import os
import sys
import urllib.request

import anthropic
import openai

json.load(sys.stdin)
with openai.OpenAI() as client:
    assert [one.id for one in client.models.list()] == ["asker", "solver"]
    asked = client.chat.completions.create(model="asker", messages=[{"role": "user", "content": "Ask something."}])
    question = asked.choices[0].message.content
with anthropic.Anthropic() as other:
    try:
        other.messages.create(model="claude", max_tokens=9, messages=[{"role": "user", "content": question}])
        sys.exit("a model that is no role has answered")
    except anthropic.NotFoundError:
        pass
    answer = other.messages.create(model="solver", max_tokens=99, messages=[{"role": "user", "content": question}])
right = answer.content[0].text == "42"
body = json.dumps({"reward": {"asker": -1.0 if right else 1.0, "solver": float(right)}}).encode()
head = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
urllib.request.urlopen(urllib.request.Request(os.environ["ROLL_REWARD_URL"], body, head))
