#!/bin/sh
# Ten minutes of a newcomer, from a clone to a client. Needs git, make, Python and a C++ compiler; stops at the first
# thing that fails. Usage: sh tests/newcomer.sh [REPOSITORY]
set -eu

repository=${1:-$(cd "$(dirname "$0")/.." && pwd)}
folder=$(mktemp -d)
port=8123
trap 'kill "${server:-0}" 2>/dev/null || true; rm -rf "$folder"' EXIT

step() {
    printf '\n$ %s\n' "$*"
    "$@"
}

cd "$folder"
step git clone --quiet --depth 1 "file://$repository" bitmtp
cd bitmtp
step make demo
export PATH="$PWD/.venv/bin:$PATH"
step bitmtp --help
step bitmtp generate "Name three colours." --max-tokens 32

printf '\n$ bitmtp chat    (/help, a message, /stats)\n'
printf '/help\nName three things that float.\n/stats\n' | bitmtp chat --max-tokens 48

step pip install --quiet --disable-pip-version-check 'bitmtp[serve]' openai
printf '{"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"], "additionalProperties": false}\n' >age.json
step bitmtp generate "How old is a typical student?" --schema age.json

printf '\n$ bitmtp serve --port %s &\n' "$port"
bitmtp serve --port "$port" 2>server.log &
server=$!
step python - "$port" <<'PYTHON'
import sys
import time
import urllib.request

from openai import OpenAI

url = f"http://127.0.0.1:{sys.argv[1]}"
for _ in range(100):
    try:
        urllib.request.urlopen(url + "/health")
        break
    except OSError:
        time.sleep(0.2)
client = OpenAI(base_url=url + "/v1", api_key="unused")
model = client.models.list().data[0].id
answer = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Hello"}], max_tokens=32)
print(answer.choices[0].message.content)
print(f"the page has {len(urllib.request.urlopen(url).read())} bytes")
PYTHON
printf '\nAll of it worked.\n'
