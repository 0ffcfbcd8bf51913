#!/usr/bin/env python3
"""Joins the status page's files into one, and that into C.

usage: join.py OUTPUT.c PAGE.html STYLE.css SCRIPT.js...

The scripts share one scope of their own. What comes out asks for nothing outside itself, and its
policy names the one style and the one script that may run, by their hashes.
"""
import base64
import hashlib
import sys


def digest(text):
    return "'sha256-%s'" % base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def policy(style, script):
    return "; ".join((
        "default-src 'none'", "script-src " + digest(script), "style-src " + digest(style), "img-src data:",
        "connect-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
        "require-trusted-types-for 'script'", "trusted-types 'none'"))


def main(output, page, style, *scripts):
    style, page = read(style), read(page)
    script = '"use strict";\n(() => {\n' + "\n".join(read(path) for path in scripts) + "})();\n"
    for text, what in ((style, "</style"), (script, "</script")):
        if what in text:
            sys.exit("join.py: %s would end its element" % what)
    for name, text in (("@STYLE@", style), ("@SCRIPT@", script)):
        if page.count(name) != 1:
            sys.exit("join.py: %s must stand once in the page" % name)
        page = page.replace(name, text)
    data = page.encode()
    lines = [", ".join("0x%02x" % byte for byte in data[at : at + 16]) for at in range(0, len(data), 16)]
    with open(output, "w", encoding="ascii") as file:
        file.write('/* Made by server/web/join.py. */\n#include "server/page.h"\n\n')
        file.write("const char dkv_page_policy[] =\n    \"%s\";\n" % policy(style, script).replace("; ", ";\"\n    \" "))
        file.write("const size_t dkv_page_bytes = %du;\n" % len(data))
        file.write("const unsigned char dkv_page[] = {\n    %s,\n};\n" % ",\n    ".join(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
