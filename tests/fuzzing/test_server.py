from fuzzing import server


def test_eighty_requests_end_in_an_answer_and_leave_the_server_as_it_was():
    found = server.fuzz(seed=1, count=80)
    assert found.failures == ()
    assert found.cases == found.accepted + found.refused == 80
    assert found.accepted > 5
