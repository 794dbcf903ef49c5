"""Formats of strings that are enforced, as patterns; `NAMED` are those of JSON Schema.

They are as narrow as usual readers expect: no leap second, no year 0, no 29th of February except in
leap years. Other names are annotations by JSON Schema and allow every string.
"""

_LEAP = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29"
_DAY = (
    r"(?:\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    r"|02-(?:0[1-9]|1\d|2[0-8]))|" + _LEAP + ")"
)
_DATE = r"(?!0000)" + _DAY
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:[Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_CLOCK = r"T(?:\d{1,4}H(?:\d{1,4}M(?:\d{1,4}S)?)?|\d{1,4}M(?:\d{1,4}S)?|\d{1,4}S)"
_DURATION = (
    r"P(?:\d{1,4}W|(?:\d{1,4}Y(?:\d{1,4}M(?:\d{1,4}D)?)?|\d{1,4}M(?:\d{1,4}D)?|\d{1,4}D)(?:"
    + _CLOCK
    + r")?|"
    + _CLOCK
    + ")"
)
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_NAME = _LABEL + r"(?:\." + _LABEL + ")*"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = _BYTE + r"(?:\." + _BYTE + "){3}"
_H = "[0-9A-Fa-f]{1,4}"
_IPV6_LAST = f"(?:{_H}:{_H}|{_IPV4})"
_IPV6 = "|".join(
    [
        f"(?:{_H}:){{6}}{_IPV6_LAST}",
        f"::(?:{_H}:){{5}}{_IPV6_LAST}",
        *(
            f"(?:(?:{_H}:){{0,{before}}}{_H})?::(?:{_H}:){{{4 - before}}}{_IPV6_LAST}"
            for before in range(5)
        ),
        f"(?:(?:{_H}:){{0,5}}{_H})?::{_H}",
        f"(?:(?:{_H}:){{0,6}}{_H})?::",
    ]
)
_PATH = r"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@/]|%[0-9A-Fa-f]{2})"
_QUERY = r"(?:\?(?:" + _PATH + r"|\?)*)?"
_FRAGMENT = r"(?:#(?:" + _PATH + r"|\?)*)?"
_HOST = r"(?:[A-Za-z0-9\-._~!$&'()*+,;=]|%[0-9A-Fa-f]{2})"
_AUTHORITY = r"(?:(?:" + _HOST + r"|:)*@)?(?:" + _HOST + r"*|\[(?:" + _IPV6 + r")\])(?::\d*)?"
_AFTER = r"(?://" + _AUTHORITY + r"(?:/" + _PATH + r"*)?|(?!//)" + _PATH + "*)"
_URI = r"[A-Za-z][A-Za-z0-9+\-.]*:" + _AFTER + _QUERY + _FRAGMENT
_RELATIVE = r"(?![^/?#]*:)" + _AFTER + _QUERY + _FRAGMENT
_ATEXT = r"[A-Za-z0-9!#$%&'*+\-/=?^_`{|}~]+"
_POINTER = r"(?:/(?:[^~/]|~[01])*)*"
_UUID = r"[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}"

_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": _DATE + "[Tt]" + _TIME,
    "duration": _DURATION,
    "email": _ATEXT + r"(?:\." + _ATEXT + r")*@" + _NAME,
    "hostname": _NAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _URI,
    "uri-reference": _URI + "|" + _RELATIVE,
    "uuid": _UUID,
    "json-pointer": _POINTER,
    "relative-json-pointer": r"(?:0|[1-9]\d*)(?:#|" + _POINTER + ")",
}
FORMATS = {name: f"^(?:{pattern})$" for name, pattern in _PATTERNS.items()}
NAMED = {*FORMATS, "idn-email", "idn-hostname", "iri", "iri-reference", "uri-template", "regex"}
