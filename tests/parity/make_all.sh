#!/bin/sh
# Makes every golden anew in a private virtual environment. usage: make_all.sh [venv]   (default: .venv in the repository's root)
# Needs python3 (3.11), its venv module, about 6 GB of disk for the packages and the package index. Tests never run this.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
venv=${1:-$here/../../.venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet -r "$here/requirements.txt"
cd "$here"
export CUDA_VISIBLE_DEVICES= TOKENIZERS_PARALLELISM=false
for part in text quants vision tokenizers chat chat_tools; do
	echo "make_$part.py"
	"$venv/bin/python" "make_$part.py"
done
echo make_images.py
"$venv/bin/python" make_images.py --keep
