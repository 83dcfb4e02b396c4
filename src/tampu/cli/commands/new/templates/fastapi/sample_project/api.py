"""The API: adds jobs, waits for results, and returns the state of a job."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel
from tampu import JobFailed

from sample_project.tasks import count_words, queue, send_welcome

#: How long a request waits for a result, in seconds.
RESULT_TIMEOUT_SECS = 10.0


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
    yield
    await queue.close()


app = FastAPI(title="sample-project", lifespan=lifespan)


class Welcome(BaseModel):
    email: str


class Text(BaseModel):
    text: str


class Added(BaseModel):
    job: str


class Status(BaseModel):
    state: str
    result: Any = None
    error: str | None = None


@app.post("/welcomes", status_code=202)
async def add_welcome(welcome: Welcome) -> Added:
    """Add a job and return its ID without waiting for it."""
    job = await send_welcome.add(welcome.email)
    return Added(job=job.id)


@app.post("/word-counts")
async def word_count(text: Text) -> dict[str, int]:
    """Add a job and wait for its result."""
    job = await count_words.add(text.text)
    try:
        return await job.result(timeout=RESULT_TIMEOUT_SECS)
    except TimeoutError:
        raise HTTPException(504, f"job {job.id} has not finished yet: see /jobs/{job.id}") from None
    except JobFailed as error:
        raise HTTPException(500, str(error)) from error


@app.get("/jobs/{job_id}")
async def job_status(job_id: str) -> Status:
    """Return the state of a job: waiting, delayed, running, done, dead or cancelled."""
    found = await queue.get_job(job_id)
    if found.state == "unknown":
        raise HTTPException(404, f"no job {job_id}, or it finished more than an hour ago")
    error = found.dead_letter.error if found.dead_letter else None
    return Status(state=found.state, result=found.result, error=error)
