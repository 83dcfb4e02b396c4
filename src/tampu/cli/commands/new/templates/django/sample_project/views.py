"""The views: sign up, and check whether the welcome was sent."""

import json
from datetime import timedelta

from django.core import signing
from django.core.exceptions import ValidationError
from django.core.validators import validate_email
from django.db import transaction
from django.http import Http404, HttpRequest, JsonResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_POST
from tampu.contrib.django import after_commit

from sample_project.models import Signup
from sample_project.tasks import send_welcome

SIGNUP = "signup"  # tokens for other purposes, signed with the same key, are not valid here


@csrf_exempt
@require_POST
def sign_up(request: HttpRequest) -> JsonResponse:
    """Store a signup. Its welcome is added when the transaction has committed, never if it rolls back."""
    try:
        email = json.loads(request.body)["email"]
        validate_email(email)
    except (ValueError, KeyError, TypeError, ValidationError):
        return JsonResponse({"error": 'expected {"email": "ada@example.com"}'}, status=400)
    with transaction.atomic():
        signup, is_new = Signup.objects.get_or_create(email=email)
        if is_new:
            after_commit(send_welcome).add(signup.pk)
    token = signing.dumps(signup.pk, salt=SIGNUP)
    return JsonResponse({"status": f"/signups/{token}"}, status=202 if is_new else 200)


@require_GET
def signup_status(_: HttpRequest, token: str) -> JsonResponse:
    """Return when the welcome was sent, to those who signed up: they have the token, and IDs could be guessed."""
    try:
        signup_id = signing.loads(token, salt=SIGNUP, max_age=timedelta(days=1))
    except signing.BadSignature as error:
        raise Http404 from error
    signup = get_object_or_404(Signup, pk=signup_id)
    return JsonResponse({"email": signup.email, "welcomed_at": signup.welcomed_at})
