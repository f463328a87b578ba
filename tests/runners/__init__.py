"""Tests of the runners. The executors' contract is no test module, yet its assertions should explain themselves."""

import pytest

pytest.register_assert_rewrite("tests.runners.executor_contract")
