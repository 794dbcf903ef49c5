"""Codebooks of ggml's IQ1, IQ2 and IQ3 types.

A code of such a type names a row of its grid: the magnitudes of 8 neighbouring weights, or of 4.
The numbers are ggml's; the tests compare them with those of the gguf package.
"""

import base64
import lzma
from functools import cache

import numpy as np

from tamis.formats.ggml_types import GGMLType

# Rows and elements of each type's grid. IQ1_M has IQ1_S's.
SHAPES = {
    GGMLType.IQ1_S: (2048, 8),
    GGMLType.IQ1_M: (2048, 8),
    GGMLType.IQ2_XXS: (256, 8),
    GGMLType.IQ2_XS: (512, 8),
    GGMLType.IQ2_S: (1024, 8),
    GGMLType.IQ3_XXS: (256, 4),
    GGMLType.IQ3_S: (512, 4),
}


# What the elements of a type's grid may be.
LEVELS = {
    GGMLType.IQ1_S: (-1, 0, 1),
    GGMLType.IQ2_XXS: (8, 25, 43),
    GGMLType.IQ2_XS: (8, 25, 43),
    GGMLType.IQ2_S: (8, 25, 43),
    GGMLType.IQ3_XXS: (4, 12, 20, 28, 36, 44, 52, 62),
    GGMLType.IQ3_S: (1, 3, 5, 7, 9, 11, 13, 15),
}


@cache
def grid_of(type_: GGMLType) -> np.ndarray:
    """The grid of a type, int8 of its shape, read-only: -1 to 1 of IQ1, 1 to 62 of the others."""
    return _grids()[GGMLType.IQ1_S if type_ == GGMLType.IQ1_M else type_]


@cache
def _grids() -> dict[GGMLType, np.ndarray]:
    """All grids. An element is three bits, its number among the type's LEVELS."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 0, "lp": 0, "pb": 0}]
    packed = lzma.decompress(base64.b64decode(_PACKED), lzma.FORMAT_RAW, filters=filters)
    bits = np.unpackbits(np.frombuffer(packed, np.uint8)).reshape(-1, 3)
    numbers, at, found = bits @ np.array([4, 2, 1], np.uint8), 0, {}
    for type_, levels in LEVELS.items():
        n_row, n = SHAPES[type_]
        chosen = numbers[at : at + n_row * n].reshape(n_row, n)
        found[type_] = np.array(levels, np.int8)[chosen]
        found[type_].flags.writeable = False
        at += n_row * n
    return found


def with_parity(signs: np.ndarray) -> np.ndarray:
    """Eight signs of each seven (uint8, one a bit, set: negative): their number is even."""
    parity = signs ^ signs >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    return signs | (parity & 1) << 7


# LZMA of the grids of LEVELS, one after another.
_PACKED = (
    b"4DF/E5gAAABozfrHix7+kWKtDJAHmUpxH1x1bNifytEzVpS570haQwbiSzV/tFh2fhOjIwv9DfkNElMufwv0CCni2Ao9"
    b"AJ3Q9+vJi3MpaWCIUeANZ4yN8aEZoTTb/TYrm3jTvyVebdHCV6+rWgQVH1HrnF/G5Lc1pW88TCavJzAu4i2M3ZN5MY94"
    b"bJUr08gtsEmd3Y/ukoA/lewN0X+DT6YjohIiu35O1Tw35gJ+9XBJdxQHqdjYv2SyyWyAxcUC1Gq2bWmqKyUruVsxJS3z"
    b"kZxUZGkFaehR79WNnQ8acHThUYGofo063LXK48IchCkGNeyBDv+OOmft8L6UEPuZBZaxvb7h9Co97SQE6+ap0WRQ1hK7"
    b"MZeLrMu/W7RVYZ1754qYabcF+eIzygi7FQe8h10fcsV3DdNMth6hSav1wbZNXGiSN94tfHywrQCLHSoZEGLAqVtQOqlW"
    b"2kYSsAcSDj7Foi7WHr02pKT0B7KujWuxdlwCrtkGPYXk38Bwetrr0NYUAT54nrw+8RA39pnCabHg+nK962YbmA2736DI"
    b"7tAUTwuh0opYlPGFIsUKumb8ISQW2yqTwP8Gh7W73j0x3UMvGo/SHPNI07ehyrmMulSIC3IlgpFCdfTomZ6SvEbtcYwJ"
    b"FSFsGuLwNDSx8sfxuqouHtfZDuy5xzn443vsMSEGZFucMY6LK5tPawRmDxVN2Gcc6QGvBlOybKtW+0mWpSRzWEKgomyW"
    b"mOAUjWzBvzUJ6kDsmUpY+8yBade8n9Ewkw1y+YaEZ8u4LE6o4BW4Cubve+DcHiJUd4NpJ/als/SdfptZN9R99SRb3jKc"
    b"p2qrxBvxxGCKo4Apy9arBpByqb7gJXe+oXj1/9i1aoo+1Xg01G5drCis8C0vnTXRAitUHW6hzPwm0sVNEBZtEWZmOlOZ"
    b"lA/32UTIC7xbubuqApgb4C4rKCeW3Y7CeUVnPitGURDMD1MPG0XwxO/eU6RV6dtVRhm0vM267AXZt7T7CFDSbIlPiX39"
    b"S0llp2wP9nuxSMHSy1/V4Ztlz/P6g/sFdhOX6OfsXL0VJjj+GFZ/KziqGAL40GS2Yls50uRyGoAEpJbN65l/kNnctmHy"
    b"57SMvtaLWB+Rm5qTxuw93OJT5AHCJamY1aoEFRnftkbt0PouPnnNORcwK+w+LihsHwwJu1fxSusAvcpJU8bDQnEZ4lBJ"
    b"970/bJH7HkqVB+ZIV7i1wDCEuYBBZxaPTtAUG35nStmgMqsuZx2fVo/4wBtZIA+7REmzznEUAIkEzVdvF3D4CKw2xtIC"
    b"jraJpONthaMBEk86K3yGGtt1JStFoM4+vnv5VdXT/vm8hb5w7cBQgrcGWCO8NFACRcKL3NvRHZAzmWc39ZaB+7nX/c8a"
    b"SU5raoX6InEVbIC4z3JcG0MDJ3MVaxbRmvad99UtYGjoOHFB++EJ4y5v61YCuKQFHQmOvhHMabM99CmodmF8h9hnyrJE"
    b"WVo13ZCsQVwNj/CEjbW6UuCwPwfoMblbun0eYKgcceLaBykOb8K7GI4/TeI0JcFiynzMA/EFCEtTAYKMEdgX0nCRk4fn"
    b"FO10XDFJDmGgVh2nANLIGRwLnjcj9W6QzmrmtXBDCd1ag3hwsf92atYm2yprzIJFWV2B7ifPHVawxrD2Nv+p3OLfjT/Y"
    b"Cr1F6SO5Iq4kF6lUNg9nOlhjg8mmmdvSMYnjyKnkZ6Oyf8MqCIQQmBLwzMuRnweyqff7JALZPWLl0ZOrURGeLDUANA0T"
    b"Se4f6HZ4ZktHVHQSCy6ozEc9r7hEfOLGtMGfJLAfBxDhYdruT4EUnvkPNCx92QRPa/VV74xemkQOZjpU8sMZYLuAK16u"
    b"uK1iRybZAPYBR7DZsw+4r6wBWJbvn8WZJg1raLAjzuNgIwfvgwqwbMEJLiEKAFnjuo0hbosIOgXXqPDXeY63bPLnmdvZ"
    b"Zei1FeTrzvTG9qPD2PdiJpLSYng+zTiFQiG8NOJWT2zP50HaWHMbG0Wqf0uGbEs+ZONKV+jFR73qT1Cn6zPBG/R2l2dS"
    b"qzNHsNnzr9RBmRvGfTqZS2aKUsFISfVs/e8Ox3qdaTfEhMG/maDnWFZshd+ZpzCSDiETTe5XfzJiiWweXntAgpFLasnd"
    b"FcclQ7+HRtV8Jcxa3OSDhp1m6LDFfvRYzm/98nbOJLqBYe9/H0gUrG5CnWgYI0x1oVp0XgU1Z8rupyL6Lg7HYpYzTETZ"
    b"YKWBNivu9pERyEqNWMgLGAAXOoGaWMJ5e1e+ua2cSpfuWTpeq625QhGOuoOnZsNptehxXSh2RrZbPHWWEAxlHIrAyiMC"
    b"SydGYkMT9kUo52BwEpByz7adhBGHw9vnCpsR3e35WyY+WCIFwRxL4qZATGzBqd9IgHuAqNDtSLNg+hxwd24DIEvsGgS4"
    b"qbUfHL/N3QBcUttG59dF97lvIihc7y/PO+yMwDFwnkT29Rt2W0uZwNGkmuqzF+b8uAtg7huIKsOfYxxNu7Pkk7TjI5BO"
    b"t8x3Vipzjm4Sb7GjoIxZmOswMJNeOczxy7fMuRlTCbe8XCfw1lQB12yVOr25LJL9HDABB4/niBFOFH4Yvd33lIyDf+9C"
    b"pUPFOUuwxykwiiWUmrrWVp7lI9UVlFdGLGBagRJHrWeGQjRmpluj00H80qtH2H12yCUwxTg3ajgyZnGW9ood+9nux+iI"
    b"zx5C0YoUFM780rUufEjZMz3fiIMigRiEZ6IyAvZy2xzKvWlRAtjkSO7Nl86VoFNGykOW8+9gnVqVEeOGFTVLi/ZSSONZ"
    b"Q4XXc0rCaiaxYFnIwCt6XMSGXbdw/FJZalO4gaWVmoGXHyurXeipBG6r/+wc875V5M3ZttwGcURinO7a0lIYR8bu4V1c"
    b"94TySy0BmTBJgYcyaFyF7PAKbHpV9Lnhsb6IPgvhc7AnKI05BxyAVODSRN5LmZVoclq+ZuzDabCugaWyEsvxgkC3mVzY"
    b"bJww3YRDxUE3rlV1CZjsY4wRYwCpqS4mPKBo3zAOEl60gcNaubrBge+D3/HaE7vdH/1wcc6rCNVxH3ukED0mQgq/fPd6"
    b"glup29VTc/+LXeZQW29+Ilj8v0Bhx5IPyp8ndx0dkz/1mpD5zBfumBgCfMQgl8zGIg78UoZaqPpWkmbOSpaq7+HA5GF9"
    b"Fs0P/s54d2/PjV2k2I4AmNfC2VIPJ+mi2hW9itYlJAqBO+fEcRPOJjGXgxM3YCyiStYKVRY/UmTa+6hVqrJZgPWELlAf"
    b"tM6SZ+l3Q/YHt8DCNE/GS1OSw6/OhPW6Q8FxADgZSbPAkru67E5EaSXgGaxiCaIN1+Do36526LKO8qoOzRTVqi+6SV9r"
    b"BRCevdXL2Y7HiHs+sJpAGQdxaY3tk8VbyNcQDd0dw4E4qqt5Wehhk+Dnln2K0QZB4TYRp23qPMNaulqytjUZCP25OKIQ"
    b"zdKSd+IEXVWRU65R6IukUBtP+v1t05+wsdrZDyeNL1XmBNu2ZUu+j00dkvG3+XSz4bg1JhDB2wK1zeJcyTwmycpaseS5"
    b"wwJKJWTupWjsWH+xyebtTKj2XwbKgDDnX39r1xOmiHv4D2Cmw0A3tOmvOqsA7pg1T9KxadxShiyVsG4bGXbj0/pyPRwx"
    b"YSaeth8xEi1k3buNwZvqaFxfiAdzsnN37O4ncdCnAi0db2vQiOwlAMNekeVE0kYrIQXuCz6JzRU9ZCKUafP9TcaGPxeY"
    b"NdPLNa/cTZfWWVfUIhS/M8qhY41gb2rEgvfIA5TZZoaAFUl5StLvWFxV0v9pNgoJLhFCMqWW36bimtT+61+jSgKQ3wBp"
    b"cdUDCoOE4S8qgdgRarOyOMrk/0GiETY1QfexJsg7BO37WNa6iu4X6u3RZQpqfEc+681jEZJuECyqMiKnVTbxl+SE03Wg"
    b"L5XrhjdnDZwUwfCQw2hit6uS85xxHBpHREbTuTBv5znSYpp7RnudWZBI4UPhltnvoQpDI6B9D6njGr4IisB4s5KoOmKS"
    b"cQtR8D3HKpcQtEoELCVfhrw5QVTdnKr7+fNgMiHmiWQLy5lGt1h11MRZR2DSweoO6kyB48mRuEN2jEubdJrW6o6w1ENj"
    b"HlGQ8cO7JHh2rP6seof6cNbec0sro/ifhQexyn4jvbsNInSe3ngC/rsgXfnd7eMoDNJDAo/yDkMnuQ8GN3MeZrYCy9yT"
    b"Mz9rJmEL3B/CMX5Ejc1AJimdnlSPw6UQ5Yo1qu0BMbcgGNiEDZsow5Nz7J84VWlaXIpzefozl74JGKftNKzefoHx5TSV"
    b"rOdob/ZLlKoU/xgS363Z3ldsS9fiJ6qw5dtAeli7TWt4YurWhOwRZ6evS9EuLhGrArWHDiniDRpyvnFcs3r/LFL42id3"
    b"nt56IwPr8FtcvS4NSYRjhjkigUsbtVqE1ia+wpepw25HwYQUXSgM3qZKaUYPMNLDPoyRVyLKwSIZROEYSx1Td5AUplTv"
    b"Czm2bp/IqRfMvs7KeKBvf1jBgGCKitz6bk2cWWvAg24v8jPN7JXRqQq6DY0FQQXmJ+6OWr2X2P6Qot6pdOR0pMoGdYWF"
    b"nTL6t6PPyzmxztVDIBkFhIpicLKWM1Uny+IroxlFf6290RYcI2wd3KNfTKcXVizeF1z91jTQCQsnGvo6Z9IM8QR043zq"
    b"oxNl2dLwdJF8vJcdzE/E9Bqwl9kU0CzBjNBbubhOJAnPm/IQ4dnLFL4NmzlawBroLVnEeWSy4n9dKTz5HwA+PFqja5IK"
    b"t40oV+ZWKQILfess83B4JL6o1Ne5jLgzqpM1PVl/LcsFXPF0Ef+77nOYNVf4doaaa7BY9qHVg8YA5Lvlpl8uJ5Ll5meA"
    b"noiHUycdbs1EDmjlIYNNVBfh5ZEL2AvsdKPqm1u93T9+m5SzSPmdJz7h5w7mOGvwbEPrC2eCQFD0VR1egd4Z+hVCsZxe"
    b"cVzu32m7OJudyIgrMBh8S3ztnNv9YyUuStIvd4buP8weKz/bODQeb+Oz9+IodkKnQyFU+50Ju0upjYgVJwWInGlNnD7R"
    b"W5uz27bLLZqg4Co0119yY1gkdekZj9IihXURahMs0fI7OPN83DwSfmH7TlP9tig3yYpEv8kq4h1coz6NC5kjU0qiDyoh"
    b"faVgzyBvuEQZawucn1dN7k91HkjRyEfrdWmCNN4jGVEsLdU0pJ1urSoyCFsLCFI4l23T44waK4Bhup75vDd8ekcp0T3D"
    b"UluOG5CLbv7R+08r7gmOsaFiL0pmIhWvdN00W1Wk3pKtFm+GT5drOdiJnh5bSMy9a9weARKI36Qu6ldT+ZhNdn3kdLa9"
    b"5n0ZcXz7e+b3whV+1W76yn0I1uoUDNtJ4eds64kgfpBPFioI0+jTxpV4Yg0VQt2+MVNIOX8+RafbOsMsDxt+vQg+gt1t"
    b"4ABqeg/ISyuzMp7LTmKXfJZPH8T2iCCEN4Xu7+1zlH1ipRgVF5SpXDk/Jr+wZWajWemsN5r8/DxnHAuRZKzKPvvijDur"
    b"W/GxwHUMJ7yszsNcG6/Cjvm9B9NVznFh0CfloFGxEEKMiNRuI2SjclVwbIpQ0emqh/XWivJNFjMMoGGrDqLUhrpHaZEg"
    b"PfNC7+7Ni28qcJib6e6/nZgXXq08lRxtyRPZ6293PmoMJpZShAKMHyL89y1ycbh8/Qp7Ai2hTJRyGY/O3LI5YzLhCWtz"
    b"o+Jd1hMEvnCiyRMSqJ7dbnUbE4hL3WsmOmIv+rDVXhUuh+9aHssa/5uyDLs8WwDjwtiWmRXt/3oZNtCUATI+9A3C+ojc"
    b"3V6DnHN9Ys7SfazOsX77ogcm+nlAI3Qpmw7hSLpXOwBpKJkadTb+khbwZAUi7aRnYAaXS3nFPxfIoHjuM/djYHRkOP2e"
    b"1DsOld5oOKG0GbTzLsjU8O270SVqDQc7rNn129kIGFUorYTE758cyEWm+Abx1mhSkR5tJf1WW3vl+jHeuGMz/sOgmNgz"
    b"Rq9DZYnb8FWRoB6C/3H+5C/IS9VmJcNDS90ypFPLaJ9Bsxc+Nc2ZZDivPyQQHYqAvZ0O2sItDT2VJF5SPOPvM1evb8Um"
    b"ItdzJZNUOjCoqRrE+tjEzm+A12z9/NDsEmHs0s2AsuoIIDHCwHyTA4bxNw1DVnti3rCCSB6W7839p0X8Eqp5bNosrgOy"
    b"Q4sPDY7Rnalqt7uhAY1oR3/d6cnFj1A7EbDuKea5sXBCWaxPMnm1QL0EtnMU8NCWPlFgBTh+fpAbU0AnIeI7cGPcPvsl"
    b"oZIELC434AL+Ff8UDbuOeys7WXu7bwg+dh1WmQ3kshDbsoAD69aooOBtFSPW/T2a3cOu6iD7ycmmsIaJQXSssnIAxPJY"
    b"D3AmCsKO9JWzKpYVGrLZEH2fuOO4d2/LZCX9gBgHZbxhSf0WGa8G+853IRlQgqvoVtkJEJB+EulIxNcgGsF5RyqWaB3/"
    b"pqn2bZvNEqWVYy9mIar3LUjj3mDyzdJ9ihrV4shldX9mMqJfpb1gUA8bKT0IwVyeqwKfZ/02Ae2Eoq0Tb56vQtAd2g3+"
    b"jFYZP7zGf3krKnSUaakLrL3rXVe2J+X6cAU+JgCpWE9HsucnfKtCUm9LrZnQPh79hIVNw8y/yxIUAiU2B7IRKCtEyEWA"
    b"8KpAEuMJnJdiz/29P4Bjr0YpcxYd3Z8+3K6hHCMwvVtxnnIMTsFahp3ZVZxvqg7QgqNHrLraDhCc2hF5Y6yWG4xFpD9M"
    b"iRLNbQRGuvYaiyW3Tn2XnIM0Av/gnaJeLkuxQ8I6QRYkv5eTljrleIzcI7qV7CHQEHGEPPNDTAA="
)
