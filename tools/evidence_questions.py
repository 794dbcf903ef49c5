"""Questions for `ask_evidence`: five texts, eight questions that each answers and eight that not.

They were written before any was asked. A text answers a question if it says so in one of its
sentences; the expression is found in a right answer, whatever its case.
"""

from typing import NamedTuple

LICENCES = "/usr/share/common-licenses"
PYTHON = "/usr/share/doc/python3.*/html"


class Text(NamedTuple):
    """A text that a Debian system has: the pattern of a file's path, or the name of a manual page.

    answered: pairs of a question and the expression of its answer; others: questions only.
    """

    path: str
    answered: tuple[tuple[str, str], ...]
    others: tuple[str, ...]


APACHE = Text(
    f"{LICENCES}/Apache-2.0",
    answered=(
        ("When do patent licenses terminate if You institute patent litigation?", r"date.*filed"),
        ("What must modified files carry?", r"prominent notices"),
        ("What must You give any other recipients of the Work?", r"copy of th(is|e) license"),
        ("On what basis does the Licensor provide the Work?", r"as is"),
        ("Where must the attribution notices of a NOTICE file be included?", r"NOTICE text file"),
        ("What does this License not grant permission to use?", r"trade ?(names|marks)"),
        ("What percentage of the outstanding shares means control?", r"fifty|50"),
        ("Which fields are replaced when the Apache License is applied to a work?", r"brackets"),
    ),
    others=(
        "Who is the president of the Apache Software Foundation?",
        "How many days does a contributor have to cure a breach of the License?",
        "Which court decides disputes about this License?",
        "What fee must be paid to the Apache Software Foundation?",
        "How old must a contributor be?",
        "Which version of the GNU General Public License is compatible with this License?",
        "In which city was the Apache License written?",
        "How long must source code stay available on a server?",
    ),
)

CC0 = Text(
    f"{LICENCES}/CC0-1.0",
    answered=(
        ("Which rights held by Affirmer are not waived by this document?", r"trademark|patent"),
        ("Who is the Affirmer?", r"person|associat"),
        ("Which directive concerns database rights?", r"96/9"),
        ("On what basis does Creative Commons provide this information?", r"as-is|as is"),
        ("Does Creative Commons Corporation provide legal services?", r"\bnot?\b|n't"),
        ("From which date is the License deemed effective?", r"date.*(cc0|applied)"),
        ("In which territories does the Affirmer waive the rights?", r"all|worldwide"),
        ("To whose detriment is the Waiver made?", r"heirs|successors"),
    ),
    others=(
        "In which year was Creative Commons founded?",
        "How many works were published under CC0?",
        "What is the address of the Creative Commons office?",
        "Which museum first applied CC0 to its images?",
        "How much does it cost to register a Work under CC0?",
        "How many years after the death of the author does copyright last?",
        "Which licence should be used for software instead of CC0?",
        "What is the penalty for removing a CC0 notice?",
    ),
)

GZIP = Text(
    "man:gzip",
    answered=(
        ("Which algorithm does gzip use?", r"lempel|lz77"),
        ("What is the default compression level?", r"-?6"),
        ("By how much is text such as source code typically reduced?", r"60"),
        ("What is the exit status if a warning occurs?", r"\b2\b|two"),
        ("To which address should bugs be reported?", r"bug-gzip@gnu"),
        ("Which option keeps input files during compression?", r"-k\b|--keep"),
        ("What should be used to extract zip files with several members?", r"unzip"),
        ("Which command is identical to gunzip -c?", r"zcat"),
    ),
    others=(
        "How many threads does gzip use?",
        "Which option encrypts the compressed file with a password?",
        "What is the largest file that gzip can compress?",
        "Which programming language is gzip written in?",
        "How much memory does gzip need at level 9?",
        "Which option compresses with the Zstandard algorithm?",
        "In which country was Jean-loup Gailly born?",
        "Which web browser first supported gzip?",
    ),
)

ADDRESSES = Text(
    f"{PYTHON}/howto/ipaddress.html",
    answered=(
        ("Who are the authors of the introduction to the ipaddress module?", r"moody|coghlan"),
        ("Why is the Internet Protocol moving from version 4 to version 6?", r"enough|addresses"),
        ("What do integers that fit within 32 bits become?", r"ipv4"),
        ("Which error is raised for a network object with host bits set?", r"valueerror"),
        ("Which flag coerces the additional bits to zero?", r"strict ?= ?false"),
        ("Which exception is raised when objects of different versions are compared?", r"typeerr"),
        ("To what must addresses be coerced for other modules such as socket?", r"int|str"),
        ("Which classes describe an address on a particular network?", r"interface|hybrid"),
    ),
    others=(
        "In which version of Python was the ipaddress module added?",
        "How many IPv4 addresses are left?",
        "Which function resolves a host name to an address?",
        "How fast is ipaddress compared with netaddr?",
        "Which organisation assigns IP addresses in Europe?",
        "What is the default gateway of a network?",
        "Which port does the ipaddress module listen on?",
        "How is the country of an address found?",
    ),
)

FLOATS = Text(
    f"{PYTHON}/tutorial/floatingpoint.html",
    answered=(
        ("How many bits of precision do 754 doubles contain?", r"53"),
        ("Which base are floating-point numbers represented in by hardware?", r"2|binary|two"),
        ("Which method expresses a float in hexadecimal?", r"hex"),
        ("Which module implements decimal arithmetic for accounting applications?", r"decimal"),
        ("Which function helps mitigate loss-of-precision during summation?", r"fsum"),
        ("Which module implements arithmetic based on rational numbers?", r"fractions"),
        ("Since which version of Python is the shortest of these numbers displayed?", r"3\.1"),
        ("From what are the errors in Python float operations inherited?", r"hardware"),
    ),
    others=(
        "Who invented floating-point arithmetic?",
        "How many bytes does a Python float take in memory?",
        "Which processor was the first with a floating-point unit?",
        "How is a complex number written in Python?",
        "What is the largest number that a float can hold?",
        "Which option of the interpreter turns off rounding?",
        "What did the failure of the Ariane 5 rocket cost?",
        "How is NaN compared with itself?",
    ),
)

TEXTS = (APACHE, CC0, GZIP, ADDRESSES, FLOATS)
