"""The threads of lines: so many at a time, and kept."""

import threading

from app.batch.line_threads import LineThreads

MOST, WORKS = 3, 50
DEADLINE_S = 20.0


def test_no_more_work_than_threads_at_a_time_and_threads_are_kept() -> None:
    threads, lock, all_done = LineThreads(MOST), threading.Lock(), threading.Event()
    idents: set[int] = set()
    running = most_running = done = 0

    def work() -> None:
        nonlocal running, most_running, done
        with lock:
            running += 1
            most_running = max(most_running, running)
            idents.add(threading.get_ident())
        with lock:
            running -= 1
            done += 1
            if done == WORKS:
                all_done.set()

    for _ in range(WORKS):
        assert threads.take(DEADLINE_S)
        threads.run(work)
    assert all_done.wait(DEADLINE_S)
    assert most_running <= MOST
    assert len(idents) <= MOST


def test_who_takes_no_thread_waits_in_vain_while_all_work() -> None:
    threads, go_on = LineThreads(1), threading.Event()
    assert threads.take(DEADLINE_S)
    threads.run(go_on.wait)
    assert not threads.take(0.0)
    go_on.set()
    assert threads.take(DEADLINE_S)
