"""The owner of a key decides which host compiles the program."""

import pytest

from resilient_jax.compile.compile_claims import LEASE_S, Claimant, CompileClaims, Verdict
from resilient_jax.ids import GenerationNumber, HostName

KEY = "jit_step-1"


def claimant(name: str, generation: int = 1, *, is_ahead: bool = False) -> Claimant:
    return Claimant(
        host=HostName(name), generation=GenerationNumber(generation), endpoint=f"{name}:1", is_ahead=is_ahead
    )


A, B, C = claimant("a"), claimant("b"), claimant("c")


@pytest.fixture
def claims():
    found = CompileClaims()
    assert found.claim(KEY, A, 0.0) is Verdict.COMPILE
    return found


def test_the_first_host_compiles_and_the_others_wait(claims):
    assert claims.claim(KEY, B, 0.0) is Verdict.WAIT
    assert claims.claim(KEY, C, LEASE_S - 0.1) is Verdict.WAIT
    assert claims.claim("jit_step-2", B, 0.0) is Verdict.COMPILE


def test_the_host_that_has_the_claim_may_ask_again(claims):
    assert claims.claim(KEY, A, 1.0) is Verdict.COMPILE
    assert claims.claim(KEY, B, 1.0 + LEASE_S - 0.1) is Verdict.WAIT


def test_a_renewed_claim_lasts_and_one_that_expired_goes_to_one_other_host(claims):
    claims.renew(KEY, A.host, LEASE_S - 1)
    assert claims.claim(KEY, B, LEASE_S + 1) is Verdict.WAIT
    assert claims.claim(KEY, B, 2 * LEASE_S) is Verdict.COMPILE
    claims.renew(KEY, A.host, 2 * LEASE_S)
    assert claims.claim(KEY, C, 2 * LEASE_S) is Verdict.WAIT
    assert claims.claim(KEY, C, 3 * LEASE_S) is Verdict.COMPILE, "only the holder of a claim renews it"


def test_training_takes_over_what_is_compiled_in_the_background_and_never_the_reverse():
    claims = CompileClaims()
    assert claims.claim(KEY, claimant("a", is_ahead=True), 0.0) is Verdict.COMPILE
    assert claims.claim(KEY, claimant("c", is_ahead=True), 0.0) is Verdict.WAIT
    assert claims.claim(KEY, B, 0.0) is Verdict.COMPILE
    assert claims.claim(KEY, claimant("c", is_ahead=True), 0.0) is Verdict.WAIT


def test_a_compiled_program_is_found_at_the_host_that_compiled_it(claims):
    assert claims.find_holder(KEY) is None
    claims.finish(KEY, A, is_kept=True)
    assert claims.find_holder(KEY) == A.endpoint


def test_a_program_that_was_not_kept_is_compiled_by_all_at_once(claims):
    claims.finish(KEY, A, is_kept=False)
    assert claims.find_holder(KEY) is None
    assert [claims.claim(KEY, host, 0.0) for host in (A, B, C)] == [Verdict.COMPILE] * 3


def test_the_claims_of_a_generation_end_with_it(claims):
    claims.claim("jit_step-2", claimant("c", 2), 0.0)
    claims.finish("jit_step-3", A, is_kept=True)
    claims.finish("jit_step-4", B, is_kept=True)
    claims.drop_older(GenerationNumber(2), [B.endpoint, C.endpoint])
    assert claims.claim(KEY, claimant("b", 2), 0.0) is Verdict.COMPILE
    assert claims.claim("jit_step-2", claimant("b", 2), 0.0) is Verdict.WAIT, (
        "it was claimed in this generation"
    )
    assert claims.find_holder("jit_step-3") is None, "that host is gone"
    assert claims.find_holder("jit_step-4") == B.endpoint
