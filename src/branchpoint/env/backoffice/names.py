"""The words that worlds are made of. Customers' last names are split by pool, so that no pool meets another's."""

from __future__ import annotations

from collections.abc import Mapping


def _w(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST = _w(
    "Ada Bram Cleo Dov Elif Finn Greta Hugo Ines Jonas Kira Lars Mina Nils Odile Pavel Rosa Sven Tara Umar Vera Wim "
    "Yara Zeno Alba Boris Cora Dario Edda Fabio Gita Henk Ilse Jana Karim Lena Milo Nora Otto Petra"
)
LAST: Mapping[str, tuple[str, ...]] = {
    "train": _w(
        "Park Stone Brook Field Marsh Wolff Lindt Moreau Okafor Tanaka Silva Novak Haas Berg Costa Duval Ender Falk "
        "Grimm Holm Ivers Jansen Kowal Lopez Meyer Nagy Olsen Perez Quist Rossi Sato Toth Ueda Vogel Weiss Xu Yilmaz "
        "Zorn Acker Brandt Conti Dietz Evers Fuchs Garcia Horn Ikeda Jung"
    ),
    "validation": _w(
        "Abbot Beck Cohen Dahl Egger Frost Gruber Hayes Iyer Jost Klein Lund Mori Nash Orlov Pohl Quinn Reyes Salo "
        "Thorn Unger Vance Wirth Young Zapata Almeida Bishop Castro Drake Erdem Farkas Gomes Hoshi Ito Jahn Kern "
        "Lang Mills Noor Osman"
    ),
    "test": _w(
        "Adler Bauer Chen Diaz Engel Fabre Gold Huber Ivanov Joshi Kaya Lowe Mann Neri Otten Pires Rahn Sharma Timm "
        "Usman Vidal Wong Yamada Zeller Amsel Bosch Corso Dunn Eliot Fermi Gable Hart Innes Jarvis Kuhn Lamb Maier "
        "Noble Ortiz Pratt"
    ),
}
PRODUCTS = _w(
    "lamp kettle chair desk clock mirror rug vase stool shelf blanket pillow toaster blender fan heater radio speaker "
    "camera tripod backpack tent bottle helmet scarf jacket umbrella wallet belt mug teapot pan knife tray basket "
    "ladder drill hammer saw torch"
)
STREETS = _w("Elm Oak Birch Cedar Maple Willow Harbor Mill River Garden Station Castle Meadow Orchard Chapel Bridge")
KINDS = _w("Road Lane Street Square")
TOWNS = _w("Norwick Alderton Brimley Castlow Dunmere Eastby Farholm Glenford Hartwell Inverley Kelmouth Larkhill")
SUMMARIES = (
    "please call back",
    "parcel arrived late",
    "invoice is wrong",
    "box was open",
    "part is missing",
    "cannot log in",
    "manual is missing",
    "colour is wrong",
)
