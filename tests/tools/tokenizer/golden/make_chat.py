#!/usr/bin/env python3
"""Renders conversations by chat templates in the forms of the families, with the Jinja environment of transformers.

    make_chat.py [--templates FOLDER] [FILE]

FILE (default: chat.json beside this script) gets templates, conversations, and what each pair gives; null where the template refuses.
--templates adds *.jinja of a folder, to compare with templates that are published: KEYHOLE_CHAT_GOLDEN=FILE names FILE to the test.
"""
import argparse
import json
import pathlib

from transformers.utils.chat_template_utils import _compile_jinja_template

HERE = pathlib.Path(__file__).resolve().parent

ALTERNATE = ("{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
             "{{ raise_exception('user and assistant take turns') }}{% endif %}")

TEMPLATES = {
    "llama3": "{% for m in messages %}{% set c = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + "
              "'<|eot_id|>' %}{% if loop.index0 == 0 %}{% set c = bos_token + c %}{% endif %}{{ c }}{% endfor %}"
              "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    "llama31": """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{#- The system message comes first. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {{- message.tool_calls | tojson }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "chatml": "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
              "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
              "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
              "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "thinking": """{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string and not(message.content.startswith('<r>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in message.content %}
            {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
            {%- set thought = message.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
""",
    "mistral": "{{ bos_token }}{% for message in messages %}" + ALTERNATE +
               "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
               "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token + ' ' }}{% endif %}{% endfor %}",
    "mistral3": """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("take turns") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}

{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined and message == user_messages[-1] %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- endif %}
{%- endfor %}
""",
    "llama2": "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}"
              "{% else %}{% set rest = messages %}{% set system = false %}{% endif %}{% for message in rest %}" + ALTERNATE +
              "{% if loop.index0 == 0 and system != false %}{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message['content'] %}"
              "{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
              "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
              "{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    "gemma": "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
             "{% for message in messages %}" + ALTERNATE + "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}"
             "{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + "
             "'<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}",
    "phi3": "{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\n' + message['content'] + '<|end|>\n'}}"
            "{% elif message['role'] == 'user' %}{{'<|user|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'assistant' %}"
            "{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    # What templates may use besides.
    "language": """{%- macro show(x, mark='*', n=2) -%}
  {{ mark ~ x ~ mark * 0 if false else mark ~ x ~ mark }}{{ n + 1 }}
{%- endmacro -%}
{{ show('a') }}|{{ show('b', mark="'") }}|{{ show('c', '-', n=4) }}
  {% for k, v in {'a': 1, "b": [1, 2.5, none, true, 'x"\\\\y'], 'c': {}}.items() if k != 'c' %}
    {{ loop.index }}/{{ loop.length }} {{ k }} {{ v | tojson }} {{ loop.previtem is defined }} {{ loop.revindex0 }}
  {% else %}
none
  {% endfor %}
{% set x %}block {{ 1 + 2 * 3 - 4 // 3 % 2 }} {{ 7 / 2 }} {{ 2 ** 3 }} {{ -3 // 2 }} {{ -7 % 3 }}{% endset %}
{{ x | upper }} {{ x | length }} {{ 'h\\u00e9llo w\\x6frld' | title }} {{ 'HELLO' | capitalize }} {{ "a,b,,c".split(",") | join('+') }}
{% for i in range(10) %}{% if i == 2 %}{% continue %}{% endif %}{% if i > 4 %}{% break %}{% endif %}{{ i }}{% endfor %}
{{ messages | map(attribute='role') | unique | list | length }} {{ messages | rejectattr('role', 'equalto', 'user') | list | length }}
{{ [3, 1, 2] | first }}{{ [3, 1, 2] | last }}{{ 'abc'[-1] }}{{ 'abcdef'[1:4] }}{{ 'abcdef'[::-2] }}{{ [1, 2, 3][::-1] | tojson }}{{ 'abc'[5] is defined }}
{{ 'a' in 'cat' and not 'x' in ['y'] }} {{ 1 < 2 <= 2 if true }} {{ none is none }} {{ 3 is odd }} {{ 4 is divisibleby 2 }} {{ nothing | default('d') }} {{ '' | default('e', true) }}
{{ 'a-b-c' | replace('-', '+') }} {{ '  x '.strip() ~ '|' ~ 'xxaxx'.strip('x') }} {{ '42' | int + 1 }} {{ 1.0 }} {{ 2.25 }} {{ not none }}
{%+ if true %} kept {% endif +%}
  {{- "trimmed" -}}   
   {# gone #}
   {% raw %}{{ raw }}{% endraw %}
{{ {'a': '\\u00e9', 'b': [1]} | tojson(indent=2) }}
{% generation %}generated{% endgeneration %}
{{ "tail" }}
""",
}

CONVERSATIONS = [
    [("user", "Hello!")],
    [("system", "Be brief."), ("user", "  What is 2 + 2?\n")],
    [("user", "a"), ("assistant", " <think>\nhm\n</think>\n\nb "), ("user", "c\n\nd")],
    [("system", "\u00e4 <b>"), ("user", "\U0001f600"), ("assistant", "x"), ("user", "{{ y }}"), ("assistant", "z")],
    [("user", "one"), ("user", "two")],
    [("assistant", "first")],
]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="?", type=pathlib.Path, default=HERE / "chat.json")
    parser.add_argument("--templates", type=pathlib.Path)
    options = parser.parse_args()
    templates = dict(TEMPLATES)
    if options.templates:
        templates = {p.stem: p.read_text() for p in sorted(options.templates.glob("*.jinja"))}
    result = {"conversations": [[{"role": r, "content": c} for r, c in m] for m in CONVERSATIONS], "templates": {}}
    for name, source in templates.items():
        template = _compile_jinja_template(source)
        texts = []
        for messages in result["conversations"]:
            for answer in (True, False):
                try:
                    texts.append(template.render(messages=messages, tools=None, documents=None, add_generation_prompt=answer,
                                                 bos_token="<s>", eos_token="</s>"))
                except Exception as error:  # raise_exception, and what the template has no answer to
                    print(name, messages[0], error)
                    texts.append(None)
        result["templates"][name] = {"source": source, "texts": texts}
    options.file.write_text(json.dumps(result, ensure_ascii=True, indent=0) + "\n")


if __name__ == "__main__":
    main()
