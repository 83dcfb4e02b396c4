"""The views: sign up, and check whether the welcome was sent."""

import json

from django.core.exceptions import ValidationError
from django.core.validators import validate_email
from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_POST
from tampu.contrib.django import after_commit

from sample_project.models import Signup
from sample_project.tasks import send_welcome


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
    return JsonResponse({"id": signup.pk}, status=202 if is_new else 200)


@require_GET
def signup_status(_: HttpRequest, signup_id: int) -> JsonResponse:
    """Return whether the welcome was sent."""
    signup = get_object_or_404(Signup, pk=signup_id)
    return JsonResponse({"email": signup.email, "welcomed_at": signup.welcomed_at})
