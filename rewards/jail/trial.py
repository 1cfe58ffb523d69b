"""A trial: load an answer, then try the tests on it one by one."""


def run(code, read_tests, passed):
    """Run `code`, then each of `read_tests()`, pairs of a test and a token; `passed(token)` for each that raises nothing.

    The tests are read only after the answer has been loaded, so that loading it cannot hand in their tokens.
    """
    names = {"__name__": "answer"}
    exec(compile(code, "<answer>", "exec"), names)
    for test, token in read_tests():
        try:
            exec(compile(test, "<test>", "exec"), names)
        except BaseException:  # SystemExit and KeyboardInterrupt are an answer's too
            continue
        passed(token)
