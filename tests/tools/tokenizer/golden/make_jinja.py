#!/usr/bin/env python3
"""Renders small templates by Jinja2, set up as Hugging Face transformers sets it up for chat templates.

    make_jinja.py [FILE]

FILE (default: jinja.json beside this script) gets [name, template, content, text]: what the template gives for one message of a
user with that content. Needs jinja2 alone.
"""
import json
import pathlib
import sys

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

HERE = pathlib.Path(__file__).resolve().parent
C = "messages[0]['content']"
SPACES = " \u00a0\u3000\u2003\u0085\u001c\u001f\u200b\tmid\u00a0dle\u200b\u3000 \u2028\r\n"
LINES = "{% for m in messages %}\n  {% if m %}\n<{{ m['content'] }}>\n  {% endif %}\n{% endfor %}\nend\n"

CASES = [
    ("lines", LINES, "x"),
    ("lines that end in CR LF", LINES.replace("\n", "\r\n"), "x"),
    ("lines that end in CR", LINES.replace("\n", "\r"), "x"),
    ("lines that end in all three", "a\r\n{# c #}\rb\n{% if true %}\r\nc{% endif %}\r\n\r\n", "x"),
    ("only CR LF", "\r\n", "x"),
    ("content keeps its own", "{{ %s }}|\r\n" % C, "a\r\nb\rc\n"),
    ("a string over lines", "{{ 'a\r\nb\rc' }}", "x"),
    ("a string with escapes", r"{{ 'a\r\nb' }}", "x"),
    ("escapes of Python", r"{{ '\a\b\f\v\0\101\x41\xe9\u20ac\U0001F600\q\'\"\\' }}", "x"),
    ("an escaped line end", "{{ 'a\\\r\nb' }}", "x"),
    ("trim", "[{{ %s | trim }}]" % C, SPACES),
    ("strip", "[{{ %s.strip() }}]" % C, SPACES),
    ("lstrip and rstrip", "[{{ %s.lstrip() }}|{{ %s.rstrip() }}]" % (C, C), SPACES),
    ("strip of characters", "[{{ %s.strip('\u00e9x') }}]" % C, "\u00e9x\u00e8x\u00e9"),
    ("split", "{% for w in " + C + ".split() %}[{{ w }}]{% endfor %}", SPACES + "a\u00a0b \u3000c"),
    ("split at most", "{% for w in " + C + ".split(none, 1) %}[{{ w }}]{% endfor %}", " a\u00a0 b c "),
    ("minus takes spaces of Unicode", "a\u00a0\u3000{{- 'x' -}}\u2003\u00a0b", "x"),
    ("a block takes spaces of its line", "a\n\u00a0\u3000{% if true %}\nb{% endif %}", "x"),
    ("upper", "{{ %s | upper }}|{{ %s.upper() }}" % (C, C), "h\u00e9llo stra\u00dfe \u0436 \u03b1\u03c3"),
    ("lower", "{{ %s | lower }}|{{ %s.lower() }}" % (C, C), "H\u00c9LLO \u0416 \u0391 \u0130x"),
    ("capitalize", "{{ %s | capitalize }}" % C, "\u00e9COLE \u00c9LITE"),
    ("title", "{{ %s.title() }}" % C, "\u00e9COLE d'\u00c9LITE \u0436\u0416"),
    ("a list is shown", "{{ ['a', 'it\\'s', 1, 2.5, true, none, [], {}, %s] }}" % C, "\u00e9\n\t\\\"'\u00a0\u200b\u0007\U0001F600"),
    ("a dictionary is shown", "{{ {'a': 1, 'b': ['x', {'c': false}]} }}", "x"),
    ("a message is shown", "{{ messages }}", "it's \"said\"\r"),
    ("a list in a text", "{{ 'x' ~ ['a'] }}|{{ ['a'] | string }}|{{ [['a'], 'b'] | join(',') }}", "x"),
    ("numbers are shown", "{{ 1.0 }}|{{ 100.0 }}|{{ 0.1 }}|{{ 1234567.5 }}|{{ 1 / 3 }}|{{ 0.0001 }}|{{ 0.00001 }}|{{ 0.0 }}|"
     "{{ 99999999999.0 * 100000 }}|{{ 100000000000.0 * 100000 }}|{{ [2.0, 300.0] }}", "x"),
    ("tojson", "{{ %s | tojson }}|{{ ['\u00e9', none, true] | tojson }}" % C, "\u00e9\u2028<&'\">\U0001F600\u007f"),
    ("raw", "a {% raw %}{{ x }} {% y %}{% endraw %} b", "x"),
    ("raw of lines", "a\n  {% raw %}\n{{ x }}\n  {% endraw %}\nb", "x"),
    ("raw with minus", "a \n{%- raw -%} \n {{ x }} \n {%- endraw -%} \n b", "x"),
    ("raw of CR LF", "a\r\n{% raw %}\r\n{{ x }}\r\n{% endraw %}\r\nb", "x"),
]


def text_of(source, content):
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
    messages = [{"role": "user", "content": content}]
    return environment.from_string(source).render(messages=messages, bos_token="<s>", eos_token="</s>", tools=None, documents=None,
                                                  add_generation_prompt=True)


def main():
    path = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "jinja.json"
    rows = [json.dumps([name, source, content, text_of(source, content)]) for name, source, content in CASES]
    path.write_text("[" + ",\n ".join(rows) + "]\n")


main()
