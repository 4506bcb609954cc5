"""chat.jsonl: chat templates of the known families (written here in the manner of the published ones) and of unknown ones, rendered by
jinja2 through transformers' own apply_chat_template environment. A template that refuses a conversation has "error" for "rendered"."""

import os

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

import goldens as G


def chatml(default=None, trim=False, dot=""):
    content = "message['content'] | trim" if trim else "message['content']"
    first = ""
    if default is not None:
        first = ("{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\n" + default + dot + "<|im_end|>\\n' }}{% endif %}")
    return ("{% for message in messages %}" + first + "{{ '<|im_start|>' + message['role'] + '\\n' + " + content + " + '<|im_end|>' + '\\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")


# QwQ's manner: the assistant's turn opens with a thought, and earlier answers lose theirs.
THINKS = ("{% for message in messages %}{% if message.role == 'assistant' %}{% set content = message.content.split('</think>')[-1].lstrip('\\n') %}"
          "{{ '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{% else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}")
QWEN2VL = """{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}<|im_end|>
{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def llama3(trim):
    return ("{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content']"
            + (" | trim" if trim else "") + " + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}")


# Llama 3.1 and later: two dates in front of the first system text, which is there even when it is empty.
LLAMA3_DATES = ("""{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""")
ALTERNATE = ("{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}")
# The first Mistral Instruct: no system prompt.
MISTRAL_V1 = ("{{ bos_token }}{% for message in messages %}" + ALTERNATE + "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
              "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}")


def mistral_system(open_, close, answer):
    """Later ones: the system prompt goes in front of the last user message."""
    return ("{% if messages[0]['role'] == 'system' %}{% set system_message = messages[0]['content'] %}{% set loop_messages = messages[1:] %}{% else %}{% set loop_messages = messages %}{% endif %}"
            "{{ bos_token }}{% for message in loop_messages %}" + ALTERNATE +
            "{% if message['role'] == 'user' %}{% if loop.last and system_message is defined %}{{ '" + open_ + "' + system_message + '\\n\\n' + message['content'] + '" + close + "' }}"
            "{% else %}{{ '" + open_ + "' + message['content'] + '" + close + "' }}{% endif %}{% elif message['role'] == 'assistant' %}{{ '" + answer + "' + message['content'] + eos_token }}{% endif %}{% endfor %}")


MISTRAL_V7 = ("{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST]' + message['content'] + '[/INST]' }}{% elif message['role'] == 'system' %}"
              "{{ '[SYSTEM_PROMPT]' + message['content'] + '[/SYSTEM_PROMPT]' }}{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}")
GEMMA2 = ("{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}" + ALTERNATE +
          "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}")
GEMMA3 = ("{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}{%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}{%- set loop_messages = messages[1:] -%}{%- else -%}{%- set first_user_prefix = '' -%}{%- set loop_messages = messages -%}{%- endif -%}"
          "{%- for message in loop_messages -%}" + ALTERNATE + "{%- if (message['role'] == 'assistant') -%}{%- set role = 'model' -%}{%- else -%}{%- set role = message['role'] -%}{%- endif -%}"
          "{{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else '') }}{{ message['content'] | trim }}{{ '<end_of_turn>\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}")
VICUNA_SYSTEM = "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, and polite answers to the user\\'s questions."
VICUNA = ("{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system_message = messages[0]['content'] %}{% set loop_messages = messages[1:] %}{% else %}{% set system_message = '" + VICUNA_SYSTEM + "' %}{% set loop_messages = messages %}{% endif %}"
          "{{ system_message }}{% for message in loop_messages %}{% if message['role'] == 'user' %}{{ ' USER: ' + message['content'] }}{% elif message['role'] == 'assistant' %}{{ ' ASSISTANT: ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
          "{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}")

IM = ("<|endoftext|>", "<|im_end|>")
L3 = ("<|begin_of_text|>", "<|eot_id|>")
S = ("<s>", "</s>")
# (name, family, template, bos, eos)
TEMPLATES = [
    ("chatml-default", "chatml", chatml("You are a helpful assistant", dot="."), *IM),
    ("chatml-default-nodot", "chatml", chatml("You are a helpful assistant"), *IM),
    ("chatml-default-other", "chatml", chatml("You are a careful assistant for pictures and text", dot="."), *IM),
    ("chatml-plain", "chatml", chatml(), *IM),
    ("chatml-trim", "chatml", chatml(trim=True), *IM),
    ("chatml-qwen2vl", "chatml", QWEN2VL, *IM),
    ("chatml-thinks", "chatml", THINKS, *IM),
    ("llama3-trim", "llama3", llama3(True), *L3),
    ("llama3", "llama3", llama3(False), *L3),
    ("llama3-dates", "llama3", LLAMA3_DATES, *L3),
    ("mistral-v1", "mistral", MISTRAL_V1, *S),
    ("mistral-v3", "mistral", mistral_system("[INST] ", "[/INST]", " "), *S),
    ("mistral-tekken", "mistral", mistral_system("[INST]", "[/INST]", ""), *S),
    ("mistral-v7", "mistral", MISTRAL_V7, *S),
    ("gemma2", "gemma", GEMMA2, "<bos>", "<eos>"),
    ("gemma3", "gemma", GEMMA3, "<bos>", "<eos>"),
    ("vicuna", "vicuna", VICUNA, *S),
    ("instruction", "unknown", "{% for m in messages %}{{ '### ' + m['role'] + ':\n' + m['content'] + '\n\n' }}{% endfor %}### Response:\n", *S),
    ("pipe-roles", "unknown", "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}<|assistant|>\n", *S),
    ("turn-tokens", "unknown", "{{ bos_token }}{% for m in messages %}{{ '<|START_OF_TURN_TOKEN|><|' + m['role'] + '|>' + m['content'] + '<|END_OF_TURN_TOKEN|>' }}{% endfor %}", *S),
]


def turns(*texts, system=None):
    first = [{"role": "system", "content": system}] if system is not None else []
    return first + [{"role": "user" if i % 2 == 0 else "assistant", "content": t} for i, t in enumerate(texts)]


CONVERSATIONS = [
    turns("Hello"), turns("Hello", system="You answer briefly."), turns("What is 2 + 2?", "4", "And 3 + 3?"), turns("a", "b", "c", "d", "e", system="S"),
    turns("  padded  \n", " answer ", "\tmore\n\n"), turns("padded", system="  system with spaces \n"), turns("", "x", ""), turns("line one\nline two\n\nline four"),
    turns("Zwölf 語 👩‍👩‍👧 'quoted' \"double\" \\n {{ braces }} {% raw %}"), turns("x", system=""),
    turns("control as text: <|im_end|>\n<|im_start|>system\n</s>[INST]<end_of_turn><|eot_id|> USER: ASSISTANT:"), turns("q1", "a1", "q2", "a2", "q3", system="Two\n\nparagraphs."),
]
THOUGHT = turns("q1", "<think>\nWhy?\n</think>\n\na1", "q2", "\nno thought\n</think>\na2\n", "q3")
# A system message further down, which ChatML and Llama 3 give a turn of its own.
LATE_SYSTEM = [turns("q1", "a1") + turns("q2", system="From now on in verse."), turns("q1", "a1", system="S") + turns("q2", system="  From now on in prose.\n")]
IMAGE = {"type": "image"}


def text(t):
    return {"type": "text", "text": t}


PICTURES = [
    [{"role": "user", "content": [IMAGE, text("What is this?")]}], [{"role": "user", "content": [text("Compare "), IMAGE, text(" with "), IMAGE, text(".")]}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [text("a"), text("b")]}, {"role": "assistant", "content": "c"}, {"role": "user", "content": [text("and this: "), IMAGE]}],
]


def row(name, family, template, bos, eos, messages, generate):
    out = {"name": name, "family": family, "bos": bos, "eos": eos, "template": template, "messages": messages, "add_generation_prompt": generate}
    try:
        rendered, _ = render_jinja_template(conversations=[messages], chat_template=template, add_generation_prompt=generate, bos_token=bos, eos_token=eos)
        out["rendered"] = rendered[0]
    except jinja2.exceptions.TemplateError as e:
        out["error"] = str(e)
    return out


def main():
    rows = []
    for t in TEMPLATES:
        conversations = CONVERSATIONS if t[1] != "unknown" else CONVERSATIONS[:1]
        rows += [row(*t, c, True) for c in conversations]
        if t[1] != "unknown":
            rows += [row(*t, c, False) for c in CONVERSATIONS[:2]]
        if t[1] in ("chatml", "llama3"):
            rows += [row(*t, c, True) for c in LATE_SYSTEM]
        if t[0] == "chatml-thinks":
            rows.append(row(*t, THOUGHT, True))
        if t[0] == "chatml-qwen2vl":
            rows += [row(*t, c, True) for c in PICTURES]
    G.write_jsonl(os.path.join(G.HERE, "chat.jsonl"), rows)
    print(f"  {len(rows)} rows, {sum('error' in r for r in rows)} refused by their template")


if __name__ == "__main__":
    main()
