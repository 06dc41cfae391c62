"""What reads our own files does so beside other threads."""

import gc

import syntax_trees

TEXT = "".join(f"a{n} = [{n}, (1, 2)]\n" for n in range(200))


class ParsesWhenItDies:
    """Stands for a thread that prints a traceback while a finalizer lets it run."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        def deeper(depth: int) -> None:
            if depth:
                deeper(depth - 1)
            else:
                died.append(syntax_trees.parse(TEXT))

        deeper(20)


died: list[object] = []


def test_a_collection_of_garbage_breaks_no_parse() -> None:
    thresholds = gc.get_threshold()
    gc.set_threshold(50)
    try:
        for _ in range(20):
            for _ in range(10):
                ParsesWhenItDies()
            syntax_trees.parse(TEXT)
    finally:
        gc.set_threshold(*thresholds)
    assert died
